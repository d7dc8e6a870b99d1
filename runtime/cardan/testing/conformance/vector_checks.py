"""Vectors through a whole engine: hidden states that requests ask for, and prompts that are given as vectors.

It knows no platform; all of it is held to the float64 reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cardan.ops.definitions import NumpyArray
from cardan.platform import Feature
from cardan.testing.conformance.check import Check, NotApplicableError, expect
from cardan.testing.conformance.engine_run import Answer, Ask, EngineRun, Layout, greedy, prompts, tiny
from cardan.testing.conformance.parity import hold_all
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint
from cardan.types import Pooling, SamplingParams

NEW_TOKENS = 5
CHUNKED = Layout(name="vectors", chunk=7)


def checks(subject: Subject) -> Iterator[Check]:
    """Hidden states of all tokens, those that stand for prompts, and vectors in the place of ids."""
    yield Check(part="end_to_end", name="hidden-states", run=_run_hidden, needs_ops=False)
    for pooling in Pooling:
        yield Check(part="end_to_end", name=f"pooled-{pooling}", run=_Pooled(pooling), needs_ops=False)
    yield Check(part="end_to_end", name="prompts-of-vectors", run=_run_embeds, needs_ops=False)


def _checkpoint(subject: Subject, *features: Feature) -> TinyCheckpoint:
    subject.needs(*features)
    if not subject.platform.reads_weights:
        raise NotApplicableError("the platform reads no weights, so its vectors are those of no model")
    return tiny(subject)


def _near(got: NumpyArray, wanted: NumpyArray, allowed: float, what: str) -> None:
    expect(got.shape == wanted.shape, f"{what} have the shape {list(got.shape)}, expected {list(wanted.shape)}")
    error = float(np.abs(got - wanted).max())
    expect(error <= allowed, f"{what} are off by {error:.2e}, rounding explains {allowed:.2e}")


def _run_hidden(subject: Subject) -> None:
    """One for each token of the prompt and of the output but the last, in chunks and beside requests without."""
    checkpoint = _checkpoint(subject, Feature.HIDDEN_STATES)
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0)
    requests = {
        rid: Ask(ids=ids, sampling=sampling, hidden_states=number % 2 == 0)
        for number, (rid, ids) in enumerate(prompts().items())
    }
    with EngineRun(subject, checkpoint, CHUNKED) as run:
        answers = run.ask(requests)
    for rid, request in requests.items():
        answer = answers[rid]
        if not request.hidden_states:
            expect(not answer.hidden, f"request {rid} asks for no hidden states and got {len(answer.hidden)}")
            continue
        ids = (*request.ids, *answer.tokens[:-1])
        allowed = checkpoint.hidden_rounding(ids, subject.best_dtype)
        _near(np.array(answer.hidden), checkpoint.hidden(ids), allowed, f"hidden states of request {rid}")


class _Pooled:
    """Runs prompts that want one hidden state each."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling

    def __call__(self, subject: Subject) -> None:
        checkpoint = _checkpoint(subject, Feature.HIDDEN_STATES)
        nothing = SamplingParams(max_new_tokens=0, temperature=0.0)
        requests = {rid: Ask(ids=ids, sampling=nothing, pooling=self._pooling) for rid, ids in prompts().items()}
        with EngineRun(subject, checkpoint, CHUNKED) as run:
            answers = run.ask(requests)
        for rid, request in requests.items():
            states = checkpoint.hidden(request.ids)
            wanted = states[-1] if self._pooling is Pooling.LAST else states.mean(axis=0)
            allowed = checkpoint.hidden_rounding(request.ids, subject.best_dtype)
            what = f"the numbers that stand for the prompt of request {rid} ({self._pooling})"
            _near(np.array(answers[rid].embedding), wanted, allowed, what)


def _run_embeds(subject: Subject) -> None:
    """The embedding table's own rows, so that answers must be those of the ids."""
    checkpoint = _checkpoint(subject, Feature.INPUT_EMBEDS)
    requests = {
        rid: Ask(ids=ids, embeds=checkpoint.embeds(ids), **greedy(subject, NEW_TOKENS))
        for rid, ids in prompts().items()
    }
    with EngineRun(subject, checkpoint, CHUNKED) as run:
        answers: dict[str, Answer] = run.ask(requests)
    hold_all(subject, checkpoint, requests, answers, "prompts of vectors")
