"""From logits to tokens in a fixed number of launches of fixed shape, without waiting for the device."""

from cardan_kernels.sampling.adjust import Penalties, SparseBias, adjust_logits, count_tokens
from cardan_kernels.sampling.draw import DrawInputs, draw_tokens
from cardan_kernels.sampling.noise import gumbel

__all__ = ["DrawInputs", "Penalties", "SparseBias", "adjust_logits", "count_tokens", "draw_tokens", "gumbel"]
