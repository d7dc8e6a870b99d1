"""A clock that leaps forward and back between steps: no request ends early, none is left waiting."""

from __future__ import annotations

import itertools
import math

import pytest

from cardan.config import ModelConfig
from cardan.engine.core import EngineCore
from cardan.engine.messages import Generate
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import prepare
from cardan.types import FinishKind, LogprobParams, SamplingParams

YEAR_S = 366 * 86400.0
LEAPS = {
    "steady": (0.0,),
    "forward": (0.0, 0.0, YEAR_S),
    "back": (0.0, 0.0, -3600.0),
    "both": (YEAR_S, 0.0, -2 * YEAR_S, 0.0, YEAR_S),
}


class LeapingClock:
    """Runs a millisecond a reading, and leaps as told."""

    def __init__(self, leaps: tuple[float, ...]) -> None:
        self._leaps = itertools.cycle(leaps)
        self._now_s = 10.0 * YEAR_S

    def __call__(self) -> float:
        self._now_s += 0.001 + next(self._leaps)
        return self._now_s


def outputs(null_config, leaps: tuple[float, ...], overlap: bool):
    """Tokens of requests that queue, share prefixes and are retracted, and their last news."""
    config = null_config(max_total_tokens=150, schedule_conservativeness=0.01, disable_overlap_schedule=not overlap)
    clock = LeapingClock(leaps)
    prepared = prepare(config)
    core = EngineCore(prepared, load_model_tokenizer(ModelConfig(model=config.model.model)), clock=clock)
    tokens: dict[str, list[int]] = {}
    ends = {}
    for number in range(12):
        params = SamplingParams(max_new_tokens=30, temperature=0.0, ignore_eos=number % 2 == 0)
        prompt = [7] * (number % 3) * 4 + [number]
        core.add(Generate(f"r{number}", prompt, params, LogprobParams(), 0, None, None, clock()))
    for _ in range(3000):
        if not core.has_work:
            break
        core.turn()
        for batch in core.take_news():
            for rid, new in batch.tokens():
                tokens.setdefault(rid, []).extend(new)
            ends |= {output.rid: output for output in batch.detailed if output.finish_reason is not None}
        assert math.isfinite(core.stats().gen_throughput)
        assert core.stats().gen_throughput >= 0
    assert not core.has_work
    prepared.close()
    return tokens, ends


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("leap", ["forward", "back", "both"])
def test_leaps_change_no_output(null_config, leap: str, overlap: bool) -> None:
    steady, _ = outputs(null_config, LEAPS["steady"], overlap)
    tokens, ends = outputs(null_config, LEAPS[leap], overlap)
    assert tokens == steady
    assert len(ends) == 12
    assert {end.finish_reason.kind for end in ends.values()} <= {FinishKind.LENGTH, FinishKind.STOP}
    assert all(0 <= end.queue_s < math.inf for end in ends.values()), "nobody waits for less than no time"
