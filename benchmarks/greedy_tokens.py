"""Greedy tokens of SmolLM2 for varied prompts, recorded on the CPU platform, for comparing other platforms with it.

Run it to record them anew. It knows no platform: whoever compares says which one runs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cardan import Engine

RECORDED = Path(__file__).with_name("greedy_tokens.json")
TOKENS = 32
TIE_MARGIN = 0.02
"""Runs may part where the two best tokens' logprobs lie closer than this."""
MOST_PARTED = 1
PROMPTS = (
    "The capital of France is",
    "Water boils at",
    "def fibonacci(n):\n    ",
    "Once upon a time, there was a",
    "The three laws of motion are",
    "Question: What do bees make?\nAnswer:",
    "1, 2, 3, 5, 8, 13,",
    "import numpy as np\n\n",
    "The opposite of hot is",
    "Dear Sir or Madam,\n",
    "A recipe for pancakes:\n1.",
    "SELECT name FROM users WHERE",
    "In 1969, the first man",
    "Le chat est sur la",
    "The mitochondria is",
    "To be, or not to be,",
    "The stock market fell today because",
    "<html>\n<head>\n",
    "My favourite colour is",
    "Photosynthesis is the process by which",
    "He opened the door and saw",
    "The meaning of life is",
    "Translate to German: Good morning.\n",
    "Step 1: Preheat the oven to",
)


@dataclass(frozen=True, slots=True)
class Continuation:
    """What one prompt gave.

    Attributes:
        prompt: the text.
        tokens: ids of the greedy continuation.
        margins: by how much the best token's logprob exceeded the second's, at each of them.
    """

    prompt: str
    tokens: list[int]
    margins: list[float]


def continue_greedily(platform: str, model: str, prompts: Sequence[str], tokens: int) -> list[Continuation]:
    """Continue all prompts as one batch with float32 activations."""
    sizes = {"context_length": 128, "max_total_tokens": 2048, "max_running_requests": len(prompts)}
    with Engine(model=model, platform=platform, dtype="float32", log_level="warning", **sizes) as engine:
        answers = engine.generate(
            list(prompts),
            {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True},
            return_logprob=True,
            top_logprobs_num=2,
        )
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        tops = answer["meta_info"]["output_top_logprobs"]
        margins = [round(best[0] - second[0], 4) for best, second in tops]
        found.append(Continuation(prompt, answer["output_ids"], margins))
    return found


def recorded() -> list[Continuation]:
    """What the CPU platform gave."""
    return [Continuation(**entry) for entry in json.loads(RECORDED.read_text(encoding="utf-8"))]


def compare(got: Sequence[Continuation], want: Sequence[Continuation]) -> dict[str, object]:
    """How many continuations agree, and where and how narrowly the others parted; JSON values."""
    parted = []
    for mine, theirs in zip(got, want, strict=True):
        steps = [step for step, token in enumerate(mine.tokens) if token != theirs.tokens[step]]
        if steps:
            parted.append({"prompt": theirs.prompt, "step": steps[0], "margin": theirs.margins[steps[0]]})
    narrow = all(entry["margin"] < TIE_MARGIN for entry in parted)
    return {
        "prompts": len(got),
        "tokens_each": len(got[0].tokens),
        "equal": len(got) - len(parted),
        "parted": parted,
        "passed": narrow and len(parted) <= MOST_PARTED,
    }


def main() -> int:
    """Record; returns the exit code."""
    found = continue_greedily("cpu", sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m", PROMPTS, TOKENS)
    lines = ",\n".join(json.dumps(asdict(entry)) for entry in found)
    RECORDED.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
