"""Sequences and configs of a tiny model for tests of records and comparisons. It knows no test."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tiny_models

from cardan.accuracy.cases import Case
from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig

Ids = tuple[int, ...]


def tiny_cases() -> tuple[Case, ...]:
    rng = np.random.default_rng(0)

    def ids(count: int) -> Ids:
        return tuple(int(token) for token in rng.integers(3, tiny_models.VOCAB, count))

    shared = ids(20)
    alone = [
        Case(name=f"of {n}", ids=ids(n), num_prompt=max(1, n * 2 // 3), greedy_tokens=6) for n in (2, 5, 17, 30, 40)
    ]
    first = Case(name="first", ids=shared + ids(6), num_prompt=23, greedy_tokens=6)
    again = Case(name="again", ids=shared + ids(6), num_prompt=24, score_from=20, wave=1, greedy_tokens=6)
    return (*alone, first, again)


def tiny_config(model: Path, platform: str = "mlx", dtype: str = "float32", chunk: int = 16) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(model), dtype=dtype),  # type: ignore[arg-type]
        platform=PlatformConfig(platform=platform),
        cache=CacheConfig(max_total_tokens=2000),
        scheduler=SchedulerConfig(chunked_prefill_size=chunk, max_running_requests=16, random_seed=1),
    )
