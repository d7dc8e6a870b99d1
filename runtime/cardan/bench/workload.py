"""What a benchmark sends: prompts of chosen lengths as token ids, and when each one arrives.

It knows no tokenizer and no engine. The same shape and seed give the same workload everywhere.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from cardan.errors import ConfigError

FIRST_ID = 100
"""Ids below this are left out of prompts: special tokens of most vocabularies lie there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A workload in numbers.

    Attributes:
        num_prompts: how many requests.
        input_len: prompt tokens of each request, beyond the shared prefix.
        output_len: tokens that each request generates; the end of sequence is ignored.
        shared_prefix: tokens that all prompts begin with.
        range_ratio: lengths are drawn from ``[length * ratio, length]``; 1 makes all equal.
        request_rate: requests per second, arriving at random; infinite sends all at once.
        seed: of ids, lengths and arrivals.
    """

    num_prompts: int = 16
    input_len: int = 512
    output_len: int = 128
    shared_prefix: int = 0
    range_ratio: float = 1.0
    request_rate: float = math.inf
    seed: int = 0

    def __post_init__(self) -> None:
        for flag, value in (
            ("--num-prompts", self.num_prompts),
            ("--random-input-len", self.input_len),
            ("--random-output-len", self.output_len),
            ("--request-rate", self.request_rate),
        ):
            if not value > 0:
                raise ConfigError(f"{flag} must be above 0, got {value}.")
        if self.shared_prefix < 0:
            raise ConfigError(f"--shared-prefix must be 0 or more, got {self.shared_prefix}.")
        if not 0 < self.range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio must be above 0 and at most 1, got {self.range_ratio}.")


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of a workload.

    Attributes:
        input_ids: the prompt.
        output_len: tokens to generate.
        arrival_s: when it is sent, from the start of the run.
    """

    input_ids: tuple[int, ...]
    output_len: int
    arrival_s: float


def make_workload(shape: Shape, vocab_size: int) -> tuple[BenchRequest, ...]:
    """Draw the requests of a shape, in order of arrival.

    Raises:
        ConfigError: the vocabulary is too small to draw ids from.
    """
    if vocab_size <= FIRST_ID:
        raise ConfigError(f"The vocabulary must have more than {FIRST_ID} ids for random prompts, got {vocab_size}.")
    random = np.random.default_rng(shape.seed)
    prefix = random.integers(FIRST_ID, vocab_size, shape.shared_prefix)
    inputs = _draw_lengths(random, shape.input_len, shape)
    outputs = _draw_lengths(random, shape.output_len, shape)
    arrivals = _draw_arrivals(random, shape)
    requests = []
    for length, output_len, arrival_s in zip(inputs, outputs, arrivals, strict=True):
        own = random.integers(FIRST_ID, vocab_size, length)
        ids = tuple(int(token) for token in (*prefix, *own))
        requests.append(BenchRequest(ids, int(output_len), float(arrival_s)))
    return tuple(requests)


def _draw_lengths(random: np.random.Generator, length: int, shape: Shape) -> list[int]:
    least = max(1, math.ceil(length * shape.range_ratio))
    return [int(drawn) for drawn in random.integers(least, length + 1, shape.num_prompts)]


def _draw_arrivals(random: np.random.Generator, shape: Shape) -> list[float]:
    if math.isinf(shape.request_rate):
        return [0.0] * shape.num_prompts
    gaps = random.exponential(1 / shape.request_rate, shape.num_prompts)
    gaps[0] = 0.0
    return [float(arrival) for arrival in np.cumsum(gaps)]
