"""Every family and RoPE scaling against transformers' own float32 logits."""

from __future__ import annotations

import numpy as np
import pytest
from reference_forward import reference_logits
from tiny_models import ALL_MODELS, VOCAB, make_tiny, transformers_logits

TOLERANCE = 2e-4
"""Largest difference of a position's logits over their largest size; float32 leaves about 1e-6."""


def tokens(count: int) -> list[int]:
    return np.random.default_rng(count).integers(3, VOCAB, count).tolist()


def relative_difference(got: np.ndarray, want: np.ndarray) -> float:
    return float((np.abs(got - want).max(axis=-1) / np.abs(want).max(axis=-1)).max())


@pytest.mark.parametrize(("family", "variant"), ALL_MODELS)
def test_logits_agree_with_transformers(family, variant, tmp_path):
    folder = make_tiny(family, tmp_path / family, variant)
    ids = tokens(40)
    want = transformers_logits(folder, ids)
    difference = relative_difference(reference_logits(folder, ids), want)
    assert difference <= TOLERANCE
