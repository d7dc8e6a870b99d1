"""Whole engines on tiny models: every architecture against the numpy reference, every way to run, every request field.

It knows no platform; what one does not claim is skipped here, and that it is refused is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from cardan.engine.extensions import apply_installed_plugins
from cardan.models import MODEL_FAMILIES
from cardan.platform import Feature
from cardan.references.sampling import Knobs, adjust, choose
from cardan.testing.conformance import vector_checks
from cardan.testing.conformance.check import Check, CheckError, NotApplicableError, expect
from cardan.testing.conformance.engine_run import Answer, Ask, EngineRun, Layout, greedy, prompts, tiny
from cardan.testing.conformance.parity import hold_all, hold_logprobs, run_layout
from cardan.testing.conformance.subject import Subject
from cardan.testing.conformance.tiny_checkpoint import TinyCheckpoint
from cardan.testing.conformance.tiny_configs import CONTEXT, VOCAB, WRAPPERS
from cardan.types import LogprobParams, SamplingParams

QUICK_ARCHITECTURES = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Qwen3ForCausalLM")
WINDOWED = "Gemma2ForCausalLM"
LLAMA = "LlamaForCausalLM"
NEW_TOKENS = 24
WHOLE = Layout(name="whole prompts")
RETRACTING = Layout(name="retracted", chunk=11, pool=200)

LAYOUTS = (
    Layout(name="cold"),
    Layout(name="chunked", chunk=7),
    Layout(name="without-cache", chunk=16, radix=False),
    Layout(name="overlapped", chunk=9, overlap=True),
    Layout(name="mixed-passes", chunk=13, mixed=True),
)

FIELDS: Mapping[str, tuple[Feature, dict[str, Any]]] = {
    "temperature": (Feature.SAMPLING, {"temperature": 0.8}),
    "top_k": (Feature.SAMPLING, {"temperature": 1.1, "top_k": 3}),
    "top_p": (Feature.SAMPLING, {"temperature": 1.1, "top_p": 0.6}),
    "min_p": (Feature.SAMPLING, {"temperature": 1.5, "min_p": 0.2}),
    "frequency_penalty": (Feature.PENALTIES, {"frequency_penalty": 1.2}),
    "presence_penalty": (Feature.PENALTIES, {"presence_penalty": 1.5}),
    "repetition_penalty": (Feature.PENALTIES, {"repetition_penalty": 1.5}),
    "logit_bias": (Feature.LOGIT_BIAS, {"logit_bias": {5: 3.5, 7: -4.0, 11: float("-inf"), 20: 3.0}}),
}
"""Request fields that act on the device, each with the feature that it needs and a value that shows."""


def checks(subject: Subject) -> Iterator[Check]:
    """Architectures, ways to run, and request fields."""
    apply_installed_plugins()
    for architecture in MODEL_FAMILIES:
        if not subject.quick or architecture in QUICK_ARCHITECTURES:
            yield _check(f"parity-{architecture}", partial(_run_architecture, architecture=architecture))
    for layout in LAYOUTS:
        yield _check(layout.name, partial(_run_layout, layout=layout))
    for dtype in subject.dtypes()[1:]:
        whole = Layout(name=f"whole prompts in {dtype}", dtype=dtype)
        yield _check(f"parity-{LLAMA}[{dtype}]", partial(_run_architecture, architecture=LLAMA, layout=whole))
        chunked = Layout(name=f"chunked in {dtype}", chunk=7, dtype=dtype)
        yield _check(f"chunked[{dtype}]", partial(_run_layout, layout=chunked))
    for architecture in (LLAMA,) if subject.quick else (LLAMA, WINDOWED):
        yield _check(f"retracted-{architecture}", partial(_run_retracted, architecture=architecture))
        yield _check(f"cached-{architecture}", partial(_run_cached, architecture=architecture))
    for page in sorted(size for size in subject.capabilities.page_sizes if 1 < size <= 64)[-2:]:
        layout = Layout(name=f"pages-of-{page}", chunk=page, page=page)
        yield _check(layout.name, partial(_run_layout, layout=layout))
    for field in FIELDS:
        yield _check(f"field-{field}", partial(_run_field, field=field))
    yield _check("field-min_new_tokens", _run_min_new_tokens)
    yield _check("field-seed", _run_seed)
    yield _check("field-logprobs", _run_logprobs)
    yield _check("fields-of-all-kinds-in-one-batch", _run_all_fields)
    yield from vector_checks.checks(subject)


def _check(name: str, run: Any) -> Check:
    return Check(part="end_to_end", name=name, run=run, needs_ops=False)


def _run_architecture(subject: Subject, architecture: str, layout: Layout = WHOLE) -> None:
    if architecture in WRAPPERS:
        raise NotApplicableError(f"{architecture} is {WRAPPERS[architecture]}")
    if not subject.platform.reads_weights:
        raise NotApplicableError("the platform reads no weights, so its answers are those of no model")
    run_layout(subject, layout, architecture, new_tokens=12)


def _run_layout(subject: Subject, layout: Layout) -> None:
    run_layout(subject, layout)


def _requests(subject: Subject, new_tokens: int = NEW_TOKENS, prefix: str = "") -> dict[str, Ask]:
    return {prefix + rid: Ask(ids=ids, **greedy(subject, new_tokens)) for rid, ids in prompts().items()}


def _run_retracted(subject: Subject, architecture: str) -> None:
    """A pool too small for all requests at once: some lose their KV and are prefilled again."""
    checkpoint = tiny(subject, architecture)
    requests = _requests(subject, new_tokens=60)
    with EngineRun(subject, checkpoint, RETRACTING) as run:
        answers = run.ask(requests)
        run.check_layout(answers)
        retractions, page = run.retractions, run.prepared.plan.page_size
    if retractions == 0 and page > CONTEXT // 8:
        raise NotApplicableError(f"pages of {page} tokens, the smallest claimed, leave room for too few at once")
    expect(retractions > 0, f"no request was retracted from a pool of {RETRACTING.pool} tokens in pages of {page}")
    hold_all(subject, checkpoint, requests, answers, f"{retractions} retractions")


def _run_cached(subject: Subject, architecture: str) -> None:
    """The same prompts twice, so that the second time all but the last page comes from the cache."""
    checkpoint = tiny(subject, architecture)
    with EngineRun(subject, checkpoint, Layout(name="cached", chunk=11)) as run:
        page = run.prepared.plan.page_size
        for prefix in ("first-", "again-"):
            requests = _requests(subject, new_tokens=16, prefix=prefix)
            answers = run.ask(requests)
            run.check_layout(answers)
            plain = {rid.removeprefix(prefix): answer for rid, answer in answers.items()}
            hold_all(subject, checkpoint, _requests(subject, 16), plain, f"{prefix}run")
    longest = answers["again-r11"]
    length = len(requests["again-r11"].ids)
    expect(
        longest.cached >= (length - 1) // page * page,
        f"a prompt of {length} tokens seen before had {longest.cached} in the cache with pages of {page}",
    )


def _ask_field(index: int, ids: tuple[int, ...], changes: Mapping[str, Any]) -> Ask:
    sampling = SamplingParams(**{"max_new_tokens": 16, "temperature": 0.0, "seed": 1234 + index, **changes})
    return Ask(ids=ids, sampling=sampling)


def _field_requests(field: str) -> dict[str, Ask]:
    changes = FIELDS[field][1]
    return {
        f"{field}-{rid}": _ask_field(index, ids, changes)
        for index, (rid, ids) in enumerate(list(prompts(3).items())[2:9])
    }


def _needs_field(subject: Subject, field: str) -> None:
    subject.needs(FIELDS[field][0])
    if not subject.platform.reads_weights:
        raise NotApplicableError("the platform reads no weights, so there are no logits to choose from")


def _run_field(subject: Subject, field: str) -> None:
    _needs_field(subject, field)
    checkpoint = tiny(subject)
    requests = _field_requests(field)
    with EngineRun(subject, checkpoint, Layout(name=field, chunk=16)) as run:
        answers = run.ask(requests)
    for rid, request in requests.items():
        hold_sampled(subject, checkpoint, request, answers[rid], rid)


def _run_all_fields(subject: Subject) -> None:
    supported = [field for field, (feature, _) in FIELDS.items() if subject.capabilities.supports(feature)]
    if not supported:
        raise NotApplicableError("the platform supports none of the request fields that act on the device")
    _needs_field(subject, supported[0])
    checkpoint = tiny(subject)
    requests = {rid: request for field in supported for rid, request in list(_field_requests(field).items())[:2]}
    with EngineRun(subject, checkpoint, replace(RETRACTING, name="all fields")) as run:
        answers = run.ask(requests)
    for rid, request in requests.items():
        hold_sampled(subject, checkpoint, request, answers[rid], f"{rid} among all fields")


def hold_sampled(subject: Subject, checkpoint: TinyCheckpoint, request: Ask, answer: Answer, what: str) -> None:
    """Tokens of a request against the reference sampler over the reference's logits, where it is sure of them."""
    params = request.sampling
    expect(len(answer.tokens) == params.max_new_tokens, f"{what}: {len(answer.tokens)} tokens came")
    wanted = [wanted_token(subject, checkpoint, request, answer, step) for step in range(len(answer.tokens))]
    for step, (token, drawn) in enumerate(zip(answer.tokens, wanted, strict=True)):
        if drawn not in (None, token):
            raise CheckError(f"{what}: token {step} is {token}, but the reference draws {drawn}")
    if all(drawn is None for drawn in wanted):
        raise NotApplicableError(f"{subject.best_dtype} rounds logits so far that the reference is sure of no draw")


def wanted_token(subject: Subject, checkpoint: TinyCheckpoint, request: Ask, answer: Answer, step: int) -> int | None:
    """The token that the reference draws after those before ``step``, or None where rounding may turn it."""
    params, prompt = request.sampling, list(request.ids)
    knobs = Knobs(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        seed=params.seed or 0,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=params.repetition_penalty,
        bias=dict(params.logit_bias),
    )
    ids = (*prompt, *answer.tokens)
    logits = checkpoint.logits(ids)[len(prompt) - 1 + step]
    scores = adjust(logits, knobs, prompt, answer.tokens[:step])
    off = checkpoint.rounding(ids, subject.best_dtype) * max(knobs.repetition_penalty, 1 / knobs.repetition_penalty)
    return choose(scores, knobs, len(prompt) + step, off)


def _run_min_new_tokens(subject: Subject) -> None:
    subject.needs(Feature.LOGIT_BIAS)
    ids = prompts(4)["r5"]
    everything = tuple(range(2, VOCAB, 2))
    sampling = SamplingParams(max_new_tokens=12, min_new_tokens=6, temperature=0.0, stop_token_ids=everything)
    with EngineRun(subject, tiny(subject), Layout(name="min_new_tokens")) as run:
        answer = run.ask({"r": Ask(ids=ids, sampling=sampling)})["r"]
    early = [token for token in answer.tokens[:6] if token in everything]
    expect(not early, f"min_new_tokens 6: stop tokens {early} came among the first 6 of {answer.tokens}")
    expect(len(answer.tokens) >= 6, f"min_new_tokens 6 gave {len(answer.tokens)} tokens")


def _run_seed(subject: Subject) -> None:
    """The same seed gives the same tokens in any company; another seed gives others."""
    _needs_field(subject, "temperature")
    ids = prompts(5)["r4"]

    def ask(seed: int) -> Ask:
        return Ask(ids=ids, sampling=SamplingParams(max_new_tokens=24, temperature=1.2, seed=seed))

    checkpoint = tiny(subject)
    with EngineRun(subject, checkpoint, Layout(name="seed", chunk=16)) as run:
        alone = run.ask({"alone": ask(7)})["alone"]
        others = {f"other{seed}": ask(seed) for seed in range(20, 26)}
        answers = run.ask({**others, "among": ask(7)})
    for step, (one, other) in enumerate(zip(alone.tokens, answers["among"].tokens, strict=True)):
        if one != other:
            drawn = wanted_token(subject, checkpoint, ask(7), alone, step)
            expect(
                drawn is None,
                f"seed 7 gave {one} as token {step} alone and {other} among others; the reference draws {drawn}",
            )
            break
    different = {tuple(answers[rid].tokens) for rid in others}
    expect(len(different) > 3, f"6 seeds gave {len(different)} different answers")


def _run_logprobs(subject: Subject) -> None:
    """Of outputs and of prompts, from a position on, through chunks; and of ids that a request names."""
    subject.needs(Feature.LOGPROBS, Feature.PROMPT_LOGPROBS)
    if not subject.platform.reads_weights:
        raise NotApplicableError("the platform reads no weights, so its logprobs are those of no model")
    checkpoint = tiny(subject)
    sampling = SamplingParams(max_new_tokens=6, temperature=0.0)
    whole = LogprobParams(output=True, top=VOCAB, prompt_start=0)
    requests = {rid: Ask(ids=ids, sampling=sampling, logprobs=whole) for rid, ids in list(prompts(6).items())[1:6]}
    late = LogprobParams(output=True, top=VOCAB, prompt_start=9, token_ids=(3, 50))
    requests["late"] = Ask(ids=prompts(6)["r6"], sampling=sampling, logprobs=late)
    with EngineRun(subject, checkpoint, Layout(name="logprobs", chunk=7, radix=False)) as run:
        answers = run.ask(requests)
    hold_all(subject, checkpoint, {k: v for k, v in requests.items() if k != "late"}, answers, "logprobs")
    ids, answer = requests["late"].ids, answers["late"]
    logits = checkpoint.logits((*ids, *answer.tokens))
    allowed = 2 * checkpoint.rounding((*ids, *answer.tokens), subject.best_dtype)
    entries = [entry for entry in answer.prompt_logprobs if entry is not None]
    expect(len(entries) == len(ids) - 9, f"{len(entries)} of {len(ids)} prompt tokens have logprobs")
    hold_logprobs(entries, logits[len(ids) - 1 - len(entries) : len(ids) - 1], allowed, "prompt logprobs from 9 on")
    for entry in answer.logprobs:
        named = () if entry is None else tuple(token for token, _ in entry.chosen)
        expect(named == (3, 50), f"logprobs of ids 3 and 50 are wanted, got those of {named}")
