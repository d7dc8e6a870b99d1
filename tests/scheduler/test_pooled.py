"""Stretches of hidden states: each token of a prompt is summed once, whatever is chunked, cached or retracted."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from scheduler_harness import Harness, request, settings

from cardan.types import Batch, FinishKind, Pooling, StepResult


class PoolingHarness(Harness):
    """The hidden state of a token is its position and 1."""

    gives_states = True

    def __post_init__(self) -> None:
        super().__post_init__()
        launch = self.device.launch

        def pooling_launch(batch: Batch) -> StepResult:
            result = launch(batch)
            if batch.pooled is None or not self.gives_states:
                return result
            states = np.stack((batch.positions, np.ones(batch.num_tokens)), axis=1).astype(np.float64)
            spans = zip(batch.pooled.starts, batch.pooled.stops, strict=True)
            return dataclasses.replace(result, pooled=np.stack([states[a:b].sum(axis=0) for a, b in spans]))

        self.device.launch = pooling_launch  # type: ignore[method-assign]


@pytest.mark.parametrize("overlap", [False, True])
def test_each_token_counts_once(overlap: bool) -> None:
    harness = PoolingHarness(settings(chunked_prefill_size=4), overlap=overlap)
    prompt = list(range(18))
    harness.add(request("warm", prompt, max_new=2), request("other", 30, max_new=20))
    harness.run()
    for number in range(2):
        harness.add(
            request(f"mean{number}", prompt, max_new=0, pooling=Pooling.MEAN),
            request(f"last{number}", prompt, max_new=0, pooling=Pooling.LAST),
            request(f"more{number}", 7, max_new=0, pooling=Pooling.MEAN),
            request(f"beside{number}", 9, max_new=5),
        )
        harness.run()
        assert harness.ends[f"mean{number}"].embedding == pytest.approx((17 / 2, 1))
        assert harness.ends[f"last{number}"].embedding == (17, 1)
        assert harness.ends[f"more{number}"].embedding == pytest.approx((6 / 2, 1))
        assert harness.ends[f"beside{number}"].embedding == ()
        assert harness.ends[f"mean{number}"].num_cached_tokens == 0
        assert harness.ends[f"last{number}"].num_cached_tokens == 17
        assert not harness.tokens[f"mean{number}"]


def test_a_device_without_hidden_states_is_named() -> None:
    harness = PoolingHarness(settings())
    harness.gives_states = False
    harness.add(request("a", 5, max_new=0, pooling=Pooling.LAST))
    harness.run()
    reason = harness.ends["a"].finish_reason
    assert reason is not None
    assert reason.kind is FinishKind.ERROR
    assert "The platform gives no hidden states" in (reason.message or "")
