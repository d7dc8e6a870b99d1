"""What a platform makes of request parameters: what it says of them, and whether draws from known logits follow them.

It knows no platform and no model: the logits are a table that the device loads as a model, and requests run through
scheduler, graphs and overlap as any others.

Tokens are drawn independently of each other, so counts of them are judged by Pearson's chi-square test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.accuracy.answers import MOST, Answer
from cardan.accuracy.session import Parts, Run, Session, Way, allocate, changed_plan
from cardan.accuracy.statistics import chi_square_test
from cardan.engine.preparation import scheduler_settings
from cardan.errors import CardanError
from cardan.platform import Capabilities, Feature, Support
from cardan.references.logit_table import LAYER, VOCAB, ArrayCheckpoint, LogitModel
from cardan.references.sampling import Knobs, adjust
from cardan.types import Float32Array, Float64Array, KVLayout, SamplingParams

DRAWS = 1024
AFTER_HISTORY = 256
"""Draws of parameters that need a history, each of which runs it first; these move likely tokens, so fewer show it."""
ROWS = 16
TOKENS_EACH = 64
"""Tokens that a request draws one after the other where they do not depend on what was drawn."""
LIKELY = 48
"""Tokens that are ever drawn; their logits are an eighth apart, so that every type holds them."""
STEP = 0.125
UNLIKELY = -24.0
ORDER = tuple(int(token) for token in np.random.Generator(np.random.Philox(5)).permutation(LIKELY))
"""Tokens, the likeliest first."""
HISTORY = (ORDER[0], ORDER[0], ORDER[1])
"""Tokens that penalties have seen."""
PROMPT = (3,)


PARAMETERS: tuple[tuple[str, Feature], ...] = (
    ("temperature", Feature.SAMPLING),
    ("top_k", Feature.SAMPLING),
    ("top_p", Feature.SAMPLING),
    ("min_p", Feature.SAMPLING),
    ("frequency_penalty", Feature.PENALTIES),
    ("presence_penalty", Feature.PENALTIES),
    ("repetition_penalty", Feature.PENALTIES),
    ("logit_bias", Feature.LOGIT_BIAS),
    ("logprobs", Feature.LOGPROBS),
    ("logprobs of prompts", Feature.PROMPT_LOGPROBS),
    ("grammars", Feature.GRAMMAR_MASK),
    ("custom_logit_processor", Feature.HOST_LOGITS),
    ("hidden states", Feature.HIDDEN_STATES),
    ("prompts of vectors", Feature.INPUT_EMBEDS),
)
"""Request parameters whose meaning a platform can change, and what it says of them."""

TRIED: Mapping[str, SamplingParams] = {
    "temperature": SamplingParams(temperature=0.7),
    "top_k": SamplingParams(top_k=5),
    "top_p": SamplingParams(top_p=0.6),
    "min_p": SamplingParams(min_p=0.2),
    "frequency_penalty": SamplingParams(frequency_penalty=1.5),
    "presence_penalty": SamplingParams(presence_penalty=1.5),
    "repetition_penalty": SamplingParams(repetition_penalty=2.0),
    "logit_bias": SamplingParams(logit_bias={ORDER[1]: 2.0, ORDER[20]: 1.0}),
}
"""How each is tried; no share of a token lies at the boundary of a filter."""
WITH_HISTORY = ("frequency_penalty", "presence_penalty", "repetition_penalty")


def table() -> Float32Array:
    """The logits of every token, ``[VOCAB]``: a slope over ``LIKELY`` tokens in a mixed order."""
    logits = np.full(VOCAB, UNLIKELY, np.float32)
    logits[list(ORDER)] = 3.0 - STEP * np.arange(LIKELY)
    return logits


def probabilities(logits: Float32Array, params: SamplingParams, output: Sequence[int] = ()) -> Float64Array:
    """What a request's next token is drawn from, ``[VOCAB]``, after a prompt of ``PROMPT``, by the definitions.

    Source: nucleus: Holtzman et al., "The Curious Case of Neural Text Degeneration", section 3.1; min-p: Nguyen et
    al., "Turning Up the Heat", section 3.
    """
    knobs = Knobs(
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        bias=dict(params.logit_bias),
    )
    scores = adjust(logits.astype(np.float64), knobs, list(PROMPT), list(output)) / params.temperature
    order = np.argsort(-scores, kind="stable")
    keep = len(order) if params.top_k < 1 else params.top_k
    shares: Float64Array = np.exp(scores[order] - scores[order[0]])
    shares[keep:] = 0.0
    shares /= shares.sum()
    if params.top_p < 1:
        shares[np.cumsum(shares) - shares >= params.top_p] = 0.0
    shares[shares < params.min_p * shares[0]] = 0.0
    found = np.zeros(len(scores))
    found[order] = shares / shares.sum()
    return found


def measure(session: Session, progress: Callable[[str, int, int], None] | None = None) -> dict[str, Any]:
    """What a session's platform makes of every parameter, as plain values by name."""
    tests = _tests(session, progress)
    found: dict[str, Any] = {}
    for name, feature in PARAMETERS:
        answer = said(name, feature, session.capabilities)
        if name in TRIED and answer.support != "refused":
            answer = replace(answer, **tests.get(name, {"note": tests.get("", {}).get("note", "not tried")}))
        found[name] = asdict(answer)
    return found


def said(name: str, feature: Feature, capabilities: Capabilities) -> Answer:
    """What a platform says of a parameter."""
    capability = capabilities.get(feature)
    support = "refused" if capability.support is Support.UNSUPPORTED else str(capability.support.value)
    return Answer(name=name, support=support, reason=capability.reason)


def _tests(session: Session, progress: Callable[[str, int, int], None] | None) -> dict[str, dict[str, Any]]:
    """Fields of an answer by parameter; under the empty name why nothing could be tried."""
    asked = [name for name, feature in PARAMETERS if name in TRIED and session.capabilities.supports(feature)]
    logits = table()
    try:
        parts = _bench(session, logits)
    except CardanError as error:
        return {"": {"note": f"not tried, since the device loads no table of logits: {error}"}}
    try:
        return dict(_run_tests(Run(parts, Way(name="known logits")), logits, asked, progress))
    finally:
        parts.prepared.runner.close()


def _run_tests(
    run: Run, logits: Float32Array, asked: Sequence[str], progress: Callable[[str, int, int], None] | None
) -> Iterator[tuple[str, dict[str, Any]]]:
    for done, name in enumerate(asked):
        if progress is not None:
            progress("request parameters", done + 1, len(asked))
        params = TRIED[name]
        forced = HISTORY if name in WITH_HISTORY else ()
        each, count = (1, AFTER_HISTORY) if forced else (TOKENS_EACH, DRAWS)
        draw = partial(run.sample, PROMPT, replace(params, max_new_tokens=each), range(count // each), forced)
        try:
            tokens = np.concatenate([np.asarray(drawn, np.int64) for drawn in draw()])
        except CardanError as error:
            yield name, {"note": f"draws failed: {error}"}
            continue
        yield name, _judged(tokens, probabilities(logits, params, forced))


def _judged(tokens: npt.NDArray[np.int64], shares: Float64Array) -> dict[str, Any]:
    counts = np.bincount(tokens, minlength=len(shares)).astype(np.float64)
    statistic, freedom, p = chi_square_test(counts, shares * counts.sum())
    excluded = int(counts[shares <= 0].sum())
    return {
        "draws": int(counts.sum()),
        "statistic": min(statistic, MOST),
        "freedom": freedom,
        "p": p,
        "note": f"{excluded} tokens were drawn that it excludes" if excluded else "",
    }


def _bench(session: Session, logits: Float32Array) -> Parts:
    """A runner of the session's device over the table, with the session's own plan but for sizes.

    Raises:
        CardanError: the device does not load it.
    """
    model, device, plan = LogitModel(), session.prepared.device, session.plan
    page = plan.page_size
    tokens = len(PROMPT) + max(TOKENS_EACH, len(HISTORY) + 1)
    changes = {
        "context_length": model.facts.context_length,
        "max_running_requests": min(ROWS, plan.max_running_requests),
        "max_total_tokens": (ROWS + 1) * -(-tokens // page) * page + page,
        "quantization": None,
    }
    plan = changed_plan(replace(plan, model=model.facts, formats=()), changes, "known logits")
    checkpoint = ArrayCheckpoint({}, {"table": np.broadcast_to(logits, (VOCAB, VOCAB))})
    loaded = device.load(model, checkpoint, plan)
    layout = KVLayout(layers=(LAYER,), page_size=page, dtype=plan.kv_cache_dtype)
    settings = scheduler_settings(plan, layout.num_groups)
    pool = allocate(device, layout, settings)
    runner = device.runner(loaded, pool, plan)
    prepared = replace(session.prepared, plan=plan, loaded=loaded, pool=pool, runner=runner, settings=settings)
    return Parts(prepared, layout)
