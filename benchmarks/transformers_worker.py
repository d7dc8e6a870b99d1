"""Runs transformers' generate() for the comparison: commands as JSON lines on stdin, times as JSON lines on stdout.

It knows nothing of Cardan.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, StoppingCriteria


class Clock(StoppingCriteria):  # type: ignore[misc]
    """Notes the time of every token and never stops."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        """Called by generate() after each token."""
        self.times_s.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def main() -> None:
    """Load the GGUF file named on the command line, dequantized to bfloat16, and serve commands."""
    path, threads = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
    answer({"ready": True, "vocab_size": model.config.vocab_size})
    for line in sys.stdin:
        answer(run(model, json.loads(line)))


def answer(value: dict[str, Any]) -> None:
    """Write one line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


def run(model: Any, command: dict[str, Any]) -> dict[str, Any]:
    """One static batch; ``prompts`` are rows of equal length."""
    ids = torch.tensor(command["prompts"])
    clock = Clock()
    started_s = time.monotonic()
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=command["output_len"],
            max_new_tokens=command["output_len"],
            do_sample=False,
            stopping_criteria=[clock],
        )
    assert out.shape[1] == ids.shape[1] + command["output_len"]
    return {"ttft_s": clock.times_s[0] - started_s, "e2e_s": clock.times_s[-1] - started_s}


if __name__ == "__main__":
    main()
