"""Holds the answers of an engine to the numpy reference model, along each answer's own tokens.

It knows no platform; how far rounding may go is derived from the type of the activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.testing.conformance.check import expect
from cardan.testing.conformance.sampler_reference import log_softmax
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint
from cardan.testing.conformance.tiny_configs import VOCAB
from cardan.types import TokenLogprobs

if TYPE_CHECKING:
    from cardan.testing.conformance.engine_run import Answer, Ask

TOLERANCE = {"float32": 2e-4, "float16": 2e-2, "bfloat16": 1.2e-1}
"""Largest error of a logprob over the largest logit of its position."""
TIE_MARGIN = {"float32": 1e-3, "float16": 5e-2, "bfloat16": 4e-1}
"""Logits that lie closer than this may change places."""


def hold_all(
    subject: Subject,
    checkpoint: TinyCheckpoint,
    requests: Mapping[str, Ask],
    answers: Mapping[str, Answer],
    what: str,
) -> None:
    """Hold greedy answers to the reference; a platform that reads no weights is held to itself elsewhere."""
    if not subject.platform.reads_weights:
        hold_alike(subject, answers, what)
        return
    for rid, request in requests.items():
        hold(subject, checkpoint, request.ids, answers[rid], f"{what}, prompt of {len(request.ids)} tokens")


def hold_alike(subject: Subject, answers: Mapping[str, Answer], what: str) -> None:
    """Greedy answers must be what the first layout gave for the same prompts."""
    first: dict[str, list[int]] = subject.memo.setdefault("first-answers", {})
    for rid, answer in answers.items():
        known = first.setdefault(rid, answer.tokens)
        count = min(len(known), len(answer.tokens))
        expect(answer.tokens[:count] == known[:count], f"{what}: request {rid} got other tokens than at first")


def hold(subject: Subject, checkpoint: TinyCheckpoint, prompt: Sequence[int], answer: Answer, what: str) -> None:
    """One greedy answer: each token is the likeliest or ties with it, and logprobs are the reference's."""
    dtype = subject.best_dtype
    whole = checkpoint.logits((*prompt, *answer.tokens))
    logits = whole[len(prompt) - 1 : -1]
    for step, token in enumerate(answer.tokens):
        best = int(logits[step].argmax())
        behind = float(logits[step, best] - logits[step, token])
        expect(
            behind <= TIE_MARGIN[dtype],
            f"{what}: token {step} is {token}, whose logit lies {behind:.3g} below that of {best}, "
            "which the reference model takes",
        )
    if answer.logprobs:
        hold_logprobs(answer.logprobs, logits, TOLERANCE[dtype], what)
    if answer.prompt_logprobs:
        hold_logprobs(
            answer.prompt_logprobs[1:], whole[: len(prompt) - 1], TOLERANCE[dtype], f"{what}, prompt logprobs"
        )


def hold_logprobs(entries: Sequence[TokenLogprobs | None], logits: NumpyArray, tolerance: float, what: str) -> None:
    """Whole distributions against the reference's."""
    expect(len(entries) == len(logits), f"{what}: {len(entries)} positions have logprobs, expected {len(logits)}")
    for step, entry in enumerate(entries):
        expect(entry is not None, f"{what}: position {step} wants logprobs and got None")
        if entry is None:
            continue
        row = np.full(VOCAB, np.nan)
        for token, logprob in entry.top:
            row[token] = logprob
        expect(not np.isnan(row).any(), f"{what}: position {step} lacks alternatives that were asked for")
        error = float(np.abs(row - log_softmax(logits[step])).max() / np.abs(logits[step]).max())
        expect(
            error <= tolerance,
            f"{what}: logprobs of position {step} are off by {error:.2e} of the largest logit, allowed {tolerance:.2e}",
        )
