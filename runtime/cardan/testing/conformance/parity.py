"""Holds the answers of an engine to the numpy reference model, along each answer's own tokens.

It knows no platform; how far rounding may go is measured on the reference itself, in the type of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from cardan.ops.definitions import NumpyArray, log_softmax
from cardan.testing.conformance.check import CheckError, expect
from cardan.testing.conformance.engine_run import Answer, Ask, EngineRun, Layout, greedy, prompts, tiny
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint
from cardan.testing.conformance.tiny_configs import VOCAB
from cardan.types import TokenLogprobs


def run_layout(
    subject: Subject, layout: Layout, architecture: str = "LlamaForCausalLM", new_tokens: int = 24
) -> dict[str, Answer]:
    """Run the prompts greedily under a layout and hold the answers to the reference."""
    checkpoint = tiny(subject, architecture)
    requests = {rid: Ask(ids=ids, **greedy(subject, new_tokens)) for rid, ids in prompts().items()}
    with EngineRun(subject, checkpoint, layout) as run:
        answers = run.ask(requests)
        run.check_layout(answers)
    hold_all(subject, checkpoint, requests, answers, layout.name, layout.dtype)
    return answers


def hold_all(
    subject: Subject,
    checkpoint: TinyCheckpoint,
    requests: Mapping[str, Ask],
    answers: Mapping[str, Answer],
    what: str,
    dtype: str | None = None,
) -> None:
    """Hold greedy answers to the reference; a platform that reads no weights is held to itself."""
    for rid, request in requests.items():
        if subject.platform.reads_weights:
            named = f"{what}, prompt of {len(request.ids)} tokens"
            hold(checkpoint, request.ids, answers[rid], named, dtype or subject.best_dtype)
        else:
            hold_alike(subject, request.ids, answers[rid], f"{what}: request {rid}")


def hold_alike(subject: Subject, prompt: tuple[int, ...], answer: Answer, what: str) -> None:
    """A greedy answer must be what the first layout gave for the same prompt."""
    first: dict[tuple[int, ...], list[int]] = subject.memo.setdefault("first-answers", {})
    known = first.setdefault(prompt, answer.tokens)
    count = min(len(known), len(answer.tokens))
    expect(answer.tokens[:count] == known[:count], f"{what} got other tokens than at first")
    first[prompt] = max(known, answer.tokens, key=len)


def hold(checkpoint: TinyCheckpoint, prompt: Sequence[int], answer: Answer, what: str, dtype: str) -> None:
    """One greedy answer: each token is the likeliest or ties with it, and logprobs are the reference's."""
    ids = (*prompt, *answer.tokens)
    whole, off = checkpoint.logits(ids), checkpoint.rounding(ids, dtype)
    logits = whole[len(prompt) - 1 : -1]
    for step, token in enumerate(answer.tokens):
        best = int(logits[step].argmax())
        behind = float(logits[step, best] - logits[step, token])
        expect(
            behind <= 2 * off,
            f"{what}: token {step} is {token}, whose logit lies {behind:.3g} below that of {best}, "
            f"which the reference model takes; rounding to {dtype} explains {2 * off:.2g}",
        )
    if answer.logprobs:
        hold_logprobs(answer.logprobs, logits, 2 * off, what)
    if answer.prompt_logprobs:
        hold_logprobs(answer.prompt_logprobs[1:], whole[: len(prompt) - 1], 2 * off, f"{what}, prompt logprobs")


def hold_logprobs(entries: Sequence[TokenLogprobs | None], logits: NumpyArray, allowed: float, what: str) -> None:
    """Whole distributions against the reference's; ``allowed`` is twice what a logit may be off by.

    A logprob is a logit less the logarithm of a sum of exponentials of logits, which moves by no more than they do.
    """
    expect(len(entries) == len(logits), f"{what}: {len(entries)} positions have logprobs, expected {len(logits)}")
    for step, entry in enumerate(entries):
        if entry is None:
            raise CheckError(f"{what}: position {step} wants logprobs and got None")
        row = np.full(VOCAB, np.nan)
        for token, logprob in entry.top:
            row[token] = logprob
        expect(not np.isnan(row).any(), f"{what}: position {step} lacks alternatives that were asked for")
        error = float(np.abs(row - log_softmax(logits[step])).max())
        expect(error <= allowed, f"{what}: a logprob of position {step} is off by {error:.2e}, allowed {allowed:.2e}")
