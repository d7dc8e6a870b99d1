"""How many bytes a step takes beyond weights and pool, by a formula, for devices that cannot measure it.

It knows sizes only, no device.
"""

from __future__ import annotations

from dataclasses import dataclass

from cardan.platform import ModelFacts
from cardan.runner.logprobs import BLOCK_BYTES

FLOAT_BYTES = 4
ATTENTION_BLOCK_BYTES = 64 * 2**20
"""Bound that attention backends keep for masks and scores."""
RESIDUAL_COPIES = 4
LOGIT_COPIES = 3


@dataclass(frozen=True, slots=True)
class StepSizes:
    """The largest step that the plan allows.

    Attributes:
        tokens: that go through the model at once.
        rows: that sample at once.
    """

    tokens: int
    rows: int


def memory_formula(facts: ModelFacts, sizes: StepSizes) -> int:
    """Bytes of the largest step's arrays, each counted at float32's width.

    Per token: four copies of the residual stream, queries, keys, values and the attention's output, gate, up and
    their product. Per sampled row: three copies of the logits. And one block of attention and of prompt logprobs.
    """
    layer = max(facts.layers, key=lambda kv: kv.q_heads * kv.k_dim)
    attention = layer.q_heads * (layer.k_dim + layer.v_dim) + layer.kv_heads * (layer.k_dim + layer.v_dim)
    per_token = RESIDUAL_COPIES * facts.hidden_size + 2 * attention + 3 * facts.intermediate_size
    elements = sizes.tokens * per_token
    return elements * FLOAT_BYTES + sampling_bytes(facts, sizes) + ATTENTION_BLOCK_BYTES + BLOCK_BYTES


def sampling_bytes(facts: ModelFacts, sizes: StepSizes) -> int:
    """Bytes of the logits of all rows that sample at once, and of what is made of them."""
    return LOGIT_COPIES * facts.vocab_size * sizes.rows * FLOAT_BYTES
