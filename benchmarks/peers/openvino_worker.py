"""Runs openvino-genai for the comparison: commands as JSON lines on stdin, times as JSON lines on stdout.

It runs in an environment of its own and knows nothing of Cardan. Usage: openvino_worker.py GGUF THREADS CACHE_GB
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np
import openvino
import openvino_genai


def main() -> None:
    """Load the file named on the command line and serve commands."""
    # The pipeline writes to stdout, which here carries answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    path, threads, cache_gb = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = cache_gb
    scheduler.enable_prefix_caching = True
    scheduler.max_num_seqs = 64
    properties = {"INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", properties, {}, {})

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    answer({"ready": True})
    for number, line in enumerate(sys.stdin):
        answer(run(pipeline, json.loads(line), number))


def run(pipeline: Any, command: dict[str, Any], number: int) -> dict[str, Any]:
    """All prompts at once; the end of sequence is ignored."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = command["output_len"]
    config.ignore_eos = True
    config.do_sample = False
    started_s = time.monotonic()
    handles = []
    for index, prompt in enumerate(command["prompts"]):
        ids = openvino.Tensor(np.asarray([prompt], np.int64))
        handles.append(pipeline.add_request(number * 1000 + index, ids, config))
    first_s: dict[int, float] = {}
    tokens = 0
    while pipeline.has_non_finished_requests():
        pipeline.step()
        now_s = time.monotonic()
        for index, handle in enumerate(handles):
            while handle.can_read():
                tokens += sum(len(output.generated_ids) for output in handle.read().values())
                first_s.setdefault(index, now_s - started_s)
    wall_s = time.monotonic() - started_s
    return {"wall_s": wall_s, "first_s": sorted(first_s.values()), "tokens": tokens}


if __name__ == "__main__":
    main()
