"""From logits to tokens in a fixed number of launches of fixed shape, without waiting for the device."""

from cardan_kernels.sampling.adjust import Penalties, SparseBias, add_at, adjust_logits
from cardan_kernels.sampling.draw import DrawInputs, draw_tokens
from cardan_kernels.sampling.noise import gumbel

__all__ = ["DrawInputs", "Penalties", "SparseBias", "add_at", "adjust_logits", "draw_tokens", "gumbel"]
