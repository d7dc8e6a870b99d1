"""What attention and sampling are by their definitions, held to torch and to sums that are known."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cardan.errors import CheckpointError
from cardan.ops.definitions import log_softmax
from cardan.references.attention import attend
from cardan.references.logit_table import ArrayCheckpoint
from cardan.references.sampling import Knobs, adjust, choose
from cardan.testing.conformance.attention_checks import make_layer


def test_dense_attention_is_torchs() -> None:
    rng = np.random.default_rng(0)
    layer = make_layer(window=5)
    q, k, v = (rng.normal(size=(9, heads, 16)) for heads in (6, 2, 2))
    query, key, value = (torch.from_numpy(x).transpose(0, 1) for x in (q, np.repeat(k, 3, 1), np.repeat(v, 3, 1)))
    back = torch.arange(9)[:, None] - torch.arange(9)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=(back >= 0) & (back < 5), scale=layer.scale
    )
    want = out.transpose(0, 1).reshape(9, -1).numpy()
    assert np.abs(attend(q, k, v, layer).out - want).max() < 1e-12
    assert np.abs(attend(q[6:], k, v, layer).out - want[6:]).max() < 1e-12


def test_a_sink_takes_its_share_of_the_softmax() -> None:
    layer = make_layer(q_heads=1, kv_heads=1, k_dim=1, v_dim=1, scale=1.0, sinks=True)
    one = np.zeros((1, 1, 1))
    # scores 0 and sink log(3): the value gets a share of 1 / (1 + 3)
    assert attend(one, one, one + 8.0, layer, np.log([3.0])).out == pytest.approx(2.0)


def test_penalties_by_hand() -> None:
    knobs = Knobs(frequency_penalty=0.5, presence_penalty=1.0, repetition_penalty=2.0, bias={3: 7.0})
    logits = np.array([4.0, -4.0, 2.0, 0.0])
    # token 0: prompt only; 1: twice in the output; 2: unseen; 3: biased
    assert adjust(logits, knobs, [0], [1, 1]).tolist() == [2.0, -8.0 - 1.0 - 1.0, 2.0, 7.0]


def test_filters_keep_what_they_say() -> None:
    scores = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    picked = {
        name: {choose(scores, Knobs(temperature=1.0, seed=seed, **{name: value}), 7) for seed in range(300)} - {None}
        for name, value in (("top_k", 2), ("top_p", 0.9), ("min_p", 0.2), ("temperature", 1.0))
        if name != "temperature"
    }
    assert picked == {"top_k": {0, 1}, "top_p": {0, 1, 2}, "min_p": {0, 1, 2}}


def test_draws_follow_the_shares() -> None:
    shares = np.array([0.5, 0.3, 0.15, 0.05])
    drawn = [choose(np.log(shares), Knobs(temperature=1.0, seed=seed), 7) for seed in range(4000)]
    counts = np.bincount([token for token in drawn if token is not None], minlength=4) / len(drawn)
    assert np.abs(counts - shares).max() < 0.025


def test_what_is_too_close_to_call_is_not_called() -> None:
    assert choose(np.array([1.0, 1.0 + 1e-6, 0.0]), Knobs(), 0) is None
    assert choose(np.array([1.0, 1.0 + 2e-5, 0.0]), Knobs(), 0) == 1, "the promise is 1e-5"
    assert choose(np.array([160.0, 160.0 + 2e-5, 0.0]), Knobs(), 0) is None, "float32 is coarser there"
    assert choose(np.array([1.0, 1.5, 0.0]), Knobs(), 0, off=0.3) is None
    assert choose(np.array([1.0, 1.5, 0.0]), Knobs(), 0, off=0.2) == 1
    by_half = Knobs(temperature=0.5, top_p=0.8, seed=5)
    shares = np.log([0.5, 0.2999, 0.2001]) / 2
    assert choose(shares, by_half, 0, off=1e-3) is None, "twice as far off over half the temperature"
    assert choose(shares, by_half, 0) is not None
    assert choose(np.log([0.5, 0.3, 0.2]), Knobs(temperature=1.0, top_p=0.8), 0) is None
    assert log_softmax(np.array([[0.0, 0.0]])) == pytest.approx(np.log(0.5))


def test_arrays_are_a_checkpoint() -> None:
    values = np.arange(6.0).reshape(2, 3)
    checkpoint = ArrayCheckpoint({}, {"table": values})
    view = checkpoint.tensor("table")
    assert (view.dtype, view.shape, checkpoint.num_bytes("table")) == ("F32", (2, 3), 24)
    assert np.array_equal(checkpoint.dequantize(view), values)
    with pytest.raises(CheckpointError, match="has no tensor 'head', only table"):
        checkpoint.tensor("head")
