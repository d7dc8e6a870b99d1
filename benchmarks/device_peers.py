"""Other engines on the same GPU, each in a process of its own and only where it is installed.

It knows no platform. ``python device_peers.py ENGINE JSON`` is one such process.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
from device_parts import Clock, folder_of

ENGINES = ("transformers", "vllm", "sglang")
LEAST_S = 15
"""An engine that has less time than this is not started."""


def peers(shape: str, where: dict[str, Any], clock: Clock) -> dict[str, Any]:
    """The same measurement by each engine that is installed, as far as the time goes."""
    found: dict[str, Any] = {}
    installed = [engine for engine in ENGINES if find_spec(engine) is not None]
    for index, engine in enumerate(installed):
        limit_s = clock.left_s / (len(installed) - index)
        if limit_s < LEAST_S:
            found[engine] = {"error": "no time was left"}
            continue
        task = {
            "folder": str(folder_of(shape, where["folder"])),
            "batches": list(where["batches"]), "prompt": where["prompt"], "new": where["new"], "seconds": limit_s - 5,
        }  # fmt: skip
        command = [sys.executable, __file__, engine, json.dumps(task)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            found[engine] = {"error": f"did not end within {limit_s:.0f} s"}
            continue
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        tail = done.stderr.strip().splitlines()[-1:]
        found[engine] = json.loads(lines[-1]) if lines else {"error": " ".join(tail)[:300] or "ended without a word"}
    return found


def timed(generate: Callable[[list[list[int]], int], Any], task: dict[str, Any], vocab: int) -> dict[str, Any]:
    """Prefill by one new token, decode by what more of them take."""
    rng = np.random.default_rng(1)
    end_s = time.monotonic() + task["seconds"]
    found: dict[str, Any] = {"batches": {}}
    generate(rng.integers(3, vocab, (1, task["prompt"])).tolist(), 4)
    for rows in task["batches"]:
        if time.monotonic() > end_s:
            break
        spans = []
        for new in (1, task["new"]):
            ids = rng.integers(3, vocab, (rows, task["prompt"])).tolist()
            start_s = time.perf_counter()
            generate(ids, new)
            spans.append(time.perf_counter() - start_s)
        found["batches"][rows] = {
            "prefill_tokens_s": round(rows * task["prompt"] / spans[0], 1),
            "decode_tokens_s": round(rows * (task["new"] - 1) / max(spans[1] - spans[0], 1e-9), 1),
        }
    return found


def run_transformers(task: dict[str, Any]) -> dict[str, Any]:
    """Made-up weights on the GPU, generate()."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(task["folder"])
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()

    def generate(ids: list[list[int]], new: int) -> None:
        given = torch.tensor(ids, device="cuda")
        with torch.inference_mode():
            model.generate(
                given, attention_mask=torch.ones_like(given), max_new_tokens=new, min_new_tokens=new, do_sample=False
            )
        torch.cuda.synchronize()

    return timed(generate, task, config.vocab_size)


def run_vllm(task: dict[str, Any]) -> dict[str, Any]:
    """Dummy weights, offline."""
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=task["folder"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        max_model_len=task["prompt"] + task["new"] + 16, enable_prefix_caching=False,
    )  # fmt: skip

    def generate(ids: list[list[int]], new: int) -> None:
        params = SamplingParams(max_tokens=new, ignore_eos=True, temperature=0.0, detokenize=False)
        engine.generate([{"prompt_token_ids": row} for row in ids], params, use_tqdm=False)

    return timed(generate, task, engine.llm_engine.model_config.get_vocab_size())


def run_sglang(task: dict[str, Any]) -> dict[str, Any]:
    """Dummy weights, offline."""
    import sglang

    engine = sglang.Engine(
        model_path=task["folder"], load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16",
        disable_radix_cache=True,
    )  # fmt: skip

    def generate(ids: list[list[int]], new: int) -> None:
        engine.generate(input_ids=ids, sampling_params={"max_new_tokens": new, "ignore_eos": True, "temperature": 0.0})

    with open(f"{task['folder']}/config.json", encoding="utf-8") as file:
        vocab = int(json.load(file)["vocab_size"])
    return timed(generate, task, vocab)


RUNS = {"transformers": run_transformers, "vllm": run_vllm, "sglang": run_sglang}

if __name__ == "__main__":
    sys.stdout.write(json.dumps(RUNS[sys.argv[1]](json.loads(sys.argv[2]))) + "\n")
