"""A long run on MLX: thousands of requests of every kind leave memory where it was."""

from __future__ import annotations

import gc
from dataclasses import replace

import numpy as np
import psutil
import pytest

mx = pytest.importorskip("mlx.core")

from field_requests import LOGPROBS, PARAMS, start  # noqa: E402

from cardan.engine.messages import Generate  # noqa: E402
from cardan.testing import write_tiny_model  # noqa: E402
from cardan.types import LogprobParams  # noqa: E402

REQUESTS = 3000
AT_ONCE = 32
MIB = 2**20


def held():
    """Bytes that MLX holds and keeps, bytes of the process, and how many Python objects hold others."""
    gc.collect()
    objects = len(gc.get_objects())
    return mx.get_active_memory() + mx.get_cache_memory(), psutil.Process().memory_info().rss, objects


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_memory_is_flat_over_thousands_of_requests(tmp_path):
    core, prepared = start(write_tiny_model(tmp_path / "tiny", context_length=512), "mlx", pool=4096)
    rng, names = np.random.default_rng(0), list(PARAMS)
    sent, finished, samples = 0, 0, []
    while sent < REQUESTS or core.has_work:
        stats = core.scheduler.stats()
        for _ in range(min(AT_ONCE - stats.num_running - stats.num_queued, REQUESTS - sent)):
            name = names[sent % len(names)]
            core.add(
                Generate(
                    wire_id=str(sent),
                    prompt_ids=rng.integers(0, 256, int(rng.integers(4, 60))).tolist(),
                    sampling=replace(PARAMS[name], max_new_tokens=12, min_new_tokens=0),
                    logprobs=LOGPROBS.get(name, LogprobParams()),
                    priority=0,
                    cache_salt=None,
                    routing_key=None,
                    arrival_s=0.0,
                )
            )
            sent += 1
        core.turn()
        news = core.take_news()
        finished += sum(output.finish_reason is not None for batch in news for output in batch.detailed)
        if sent // 250 > len(samples):
            samples.append(held())
    prepared.close()
    assert finished == REQUESTS
    # the first sample is taken while the prefix cache still fills; 2,500 requests follow the second
    arrays, process, objects = zip(*samples[1:], strict=True)
    assert len(samples) == REQUESTS // 250
    # one row of logits each would be 2.5 MiB, one list each 2,500 objects
    assert max(arrays) < min(arrays) + MIB
    assert max(objects) < min(objects) + 500
    # pages of the allocator come and go: 1.6 KiB a request is what it cannot hide
    assert process[-1] < process[0] + 4 * MIB
