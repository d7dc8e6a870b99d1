"""A small model of code solves what it should, as it is served: chat template, greedy tokens, stops and all.

Source of the tasks and of what counts as a pass: Chen et al., "Evaluating Large Language Models Trained on Code", 2021.
"""

from __future__ import annotations

import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cardan_native")

from sandbox import run_python

from cardan.engine import Engine

pytestmark = [pytest.mark.accuracy, pytest.mark.timeout(1800)]

FILE = "HumanEval.jsonl.gz"
TASKS = 16
PASSES = 12
"""Of the first 16 tasks, at least."""
ASKED = (
    "Complete the following Python function. Answer with the whole function, imports included, in one code block.\n\n"
    "```python\n{prompt}\n```"
)
MOST_TOKENS = 512
_CODE = re.compile(r"```(?:python)?\n(.*?)(?:```|\Z)", re.DOTALL)


@pytest.fixture(scope="module")
def tasks() -> list[dict[str, Any]]:
    path = Path(os.environ.get("CARDAN_TEST_MODELS") or "/nowhere") / FILE
    if not path.is_file():
        pytest.skip(f"{FILE} (https://github.com/openai/human-eval, folder data) is not in CARDAN_TEST_MODELS")
    with gzip.open(path, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in lines][:TASKS]


def program(task: dict[str, Any], answer: str) -> str:
    """The answer's first code block, and the task's tests of it."""
    found = _CODE.search(answer)
    code = found[1] if found else answer
    return f"{code}\n\n{task['test']}\ncheck({task['entry_point']})\n"


def test_the_first_tasks_are_solved(
    coder_path: Path, tasks: list[dict[str, Any]], tmp_path: Path, record_property: Any
) -> None:
    with Engine(model=str(coder_path), platform="cpu", context_length=2048, max_total_tokens=16384) as engine:
        prompts = [
            engine.tokenizer.render_chat([{"role": "user", "content": ASKED.format(prompt=task["prompt"].strip())}])
            for task in tasks
        ]
        answers = engine.generate(prompts, {"temperature": 0, "max_new_tokens": MOST_TOKENS})
    failed = {}
    for task, answer in zip(tasks, answers, strict=True):
        ended = run_python(program(task, answer["text"]), tmp_path / task["task_id"].replace("/", "-"))
        if not ended.well:
            failed[task["task_id"]] = ended.said
    passed = len(tasks) - len(failed)
    record_property("passed", passed)
    record_property("failed", failed)
    assert passed >= PASSES, f"{passed} of {len(tasks)} tasks are solved; failed: {failed}"
