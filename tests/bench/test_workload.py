"""Workloads have the lengths, the shared prefix and the arrivals that were asked for."""

from __future__ import annotations

from typing import Any

import pytest

from cardan.bench.workload import FIRST_ID, Shape, make_workload
from cardan.errors import ConfigError


def test_lengths_are_those_asked_for() -> None:
    requests = make_workload(Shape(num_prompts=5, input_len=64, output_len=7), 1000)
    assert [len(request.input_ids) for request in requests] == [64] * 5
    assert [request.output_len for request in requests] == [7] * 5
    assert all(FIRST_ID <= token < 1000 for request in requests for token in request.input_ids)
    assert len({request.input_ids for request in requests}) == 5


def test_lengths_vary_within_the_ratio() -> None:
    requests = make_workload(Shape(num_prompts=400, input_len=100, output_len=10, range_ratio=0.5), 1000)
    lengths = {len(request.input_ids) for request in requests}
    assert min(lengths) >= 50
    assert max(lengths) == 100
    assert len(lengths) > 30
    assert {request.output_len for request in requests} == set(range(5, 11))


def test_a_shared_prefix_is_shared_and_the_rest_is_not() -> None:
    requests = make_workload(Shape(num_prompts=4, input_len=8, output_len=2, shared_prefix=32), 1000)
    assert {len(request.input_ids) for request in requests} == {40}
    assert len({request.input_ids[:32] for request in requests}) == 1
    assert len({request.input_ids[32:] for request in requests}) == 4


def test_the_seed_decides_everything() -> None:
    shape = Shape(num_prompts=3, range_ratio=0.5, request_rate=2.0, seed=4)
    assert make_workload(shape, 1000) == make_workload(shape, 1000)
    assert make_workload(shape, 1000) != make_workload(Shape(num_prompts=3, range_ratio=0.5, request_rate=2.0), 1000)


def test_arrivals_follow_the_rate() -> None:
    requests = make_workload(Shape(num_prompts=2000, input_len=1, output_len=1, request_rate=50.0), 1000)
    arrivals = [request.arrival_s for request in requests]
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals)
    assert arrivals[-1] / 1999 == pytest.approx(1 / 50, rel=0.1)
    assert {request.arrival_s for request in make_workload(Shape(num_prompts=3), 1000)} == {0.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_prompts": 0}, "--num-prompts must be above 0, got 0"),
        ({"input_len": -1}, "--random-input-len must be above 0"),
        ({"output_len": 0}, "--random-output-len must be above 0"),
        ({"request_rate": 0.0}, "--request-rate must be above 0"),
        ({"shared_prefix": -1}, "--shared-prefix must be 0 or more"),
        ({"range_ratio": 1.5}, "--random-range-ratio must be above 0 and at most 1, got 1.5"),
    ],
)
def test_shapes_that_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shape(**changes)


def test_a_vocabulary_without_ordinary_ids_is_refused() -> None:
    with pytest.raises(ConfigError, match="must have more than 100 ids for random prompts, got 100"):
        make_workload(Shape(), 100)
