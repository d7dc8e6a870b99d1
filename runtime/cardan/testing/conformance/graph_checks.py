"""Captured steps against eager ones: the same requests, the same answers, through every size of batch.

It knows no capture: what it compares are two engines, one of which may replay.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cardan.platform import Feature
from cardan.testing.conformance.check import Check, expect
from cardan.testing.conformance.engine_run import Answer, Ask, EngineRun, Layout, greedy, prompts, tiny
from cardan.testing.conformance.parity import hold_all
from cardan.testing.conformance.subject import Subject

REQUESTS = 9
ARCHITECTURES = ("LlamaForCausalLM", "Gemma2ForCausalLM")


def checks(subject: Subject) -> Iterator[Check]:
    """Replay against eager, for one kind of layers and for mixed ones."""
    for architecture in ARCHITECTURES:
        run = partial(_run, architecture=architecture)
        yield Check(part="graph", name=f"replay-equals-eager-{architecture}", run=run, needs_ops=False)


def _run(subject: Subject, architecture: str) -> None:
    subject.needs(Feature.GRAPH)
    checkpoint = tiny(subject, architecture)
    # lengths of output differ, so that the batch shrinks through the buckets while lengths grow through pages
    requests = {
        rid: Ask(ids=ids, **greedy(subject, 6 + 5 * index))
        for index, (rid, ids) in enumerate(list(prompts(2).items())[::-1][:REQUESTS])
    }
    answers = {}
    for graph in (False, True):
        layout = Layout(name="replayed" if graph else "eager", chunk=16, graph=graph)
        with EngineRun(subject, checkpoint, layout) as run:
            answers[graph] = run.ask(requests)
            run.check_layout(answers[graph])
    for rid, request in requests.items():
        eager = answers[False][rid]
        # both may be off from the reference, and each logprob by twice what a logit is
        margin = 4 * checkpoint.rounding((*request.ids, *eager.tokens), subject.best_dtype)
        _compare(eager, answers[True][rid], margin, f"request {rid}")
    hold_all(subject, checkpoint, requests, answers[True], "replayed")


def _compare(eager: Answer, replayed: Answer, margin: float, what: str) -> None:
    """Equal tokens, up to a first one that ties; equal logprobs before it."""
    for step, (token, other) in enumerate(zip(eager.tokens, replayed.tokens, strict=True)):
        ours, theirs = (answer.logprobs[step] if answer.logprobs else None for answer in (eager, replayed))
        if ours is not None and theirs is not None:
            mine, yours = dict(ours.top), dict(theirs.top)
            off = max(abs(mine[key] - yours.get(key, float("inf"))) for key in mine)
            expect(off <= margin, f"{what}: logprobs of token {step} differ by {off:.2e} between eager and replayed")
            if token != other and abs(mine[token] - mine[other]) <= margin:
                return
        expect(token == other, f"{what}: token {step} is {other} replayed and {token} eager")
