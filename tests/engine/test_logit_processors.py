"""Logit processors of installed packages: they are named by requests, and say what is added before each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.logit_processors import LogitProcessors, read_processor
from cardan.engine.messages import Generate
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import prepare
from cardan.engine.validation import RequestLimits, check_request
from cardan.errors import RequestError
from cardan.grammar_spec import GrammarKind, GrammarSpec
from cardan.testing.null_runner import NullStep
from cardan.types import FinishKind, LogprobParams, SamplingParams


@dataclass
class Point:
    name: str
    value: Any
    dist: Any = None

    def load(self) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


def counting(params: Any) -> Any:
    """Ids from ``start`` on, one after the other: it looks at what was said before."""
    start = params["start"]
    return lambda prompt, output: {start + len(output): 1e5, (output[-1] if output else prompt[-1]): -math.inf}


def failing(params: Any) -> Any:
    def processor(prompt: Any, output: Any) -> Any:
        if len(output) < params["after"]:
            return {65: 1e5}
        return params["gives"] if "gives" in params else output[99]

    return processor


class Second:
    """Takes the second likeliest token each time, and remembers what it saw."""

    sees_logits = True

    def __init__(self, params: Any) -> None:
        self.seen: list[Any] = []
        SEEN.append(self.seen)

    def __call__(self, prompt: Any, output: Any, logits: Any) -> Any:
        self.seen.append(logits.copy())
        logits[logits.argmax()] = -math.inf
        return logits


SEEN: list[list[Any]] = []


def ramp(params: Any) -> Any:
    """Logits that say nothing of the model: the higher the id, the likelier, up to ``params["top"]``."""

    def processor(prompt: Any, output: Any, logits: Any) -> Any:
        scores = np.arange(len(logits), dtype=np.float32) * params.get("step", 1.0)
        scores[params["top"] + 1 :] = -math.inf
        return scores

    processor.sees_logits = True  # type: ignore[attr-defined]
    return processor


ODD_LOGITS: dict[str, Any] = {
    "none": lambda logits: None,
    "short": lambda logits: logits[1:],
    "doubles": lambda logits: logits.astype(np.float64),
    "list": lambda logits: logits.tolist(),
    "nan": lambda logits: logits * np.float32(np.nan),
    "infinite": lambda logits: np.full_like(logits, math.inf),
    "nothing": lambda logits: np.full_like(logits, -math.inf),
    "raises": lambda logits: logits["x"],
}


def odd(params: Any) -> Any:
    def processor(prompt: Any, output: Any, logits: Any) -> Any:
        return ODD_LOGITS[params["gives"]](logits)

    processor.sees_logits = True  # type: ignore[attr-defined]
    return processor


def forbidding(params: Any) -> Any:
    """All but one token, by numbers that no float32 holds."""
    return lambda prompt, output: {token: -1e300 for token in range(260) if token != params["but"]}


POINTS = [
    Point("all", forbidding),
    Point("counting", counting),
    Point("failing", failing),
    Point("second", Second),
    Point("ramp", ramp),
    Point("odd", odd),
    Point("broken", ImportError("no such thing")),
]


@pytest.fixture
def start(tiny_model: Path) -> Any:
    started: list[Any] = []

    def make(platform: str = "null", **scheduler: Any) -> EngineCore:
        weights = None if platform == "null" else 1
        config = EngineConfig(
            model=ModelConfig(model=str(tiny_model), random_weights=weights, dtype="float32"),
            platform=PlatformConfig(platform=platform),
            cache=CacheConfig(max_total_tokens=512),
            scheduler=SchedulerConfig(random_seed=1, **scheduler),
        )
        started.append(prepare(config))
        processors = LogitProcessors(started[-1].settings.vocab_size, POINTS)
        return EngineCore(started[-1], load_model_tokenizer(config.model), processors=processors)

    yield make
    for prepared in started:
        prepared.close()


def generate(rid: str, processor: tuple[str, str] | None, **fields: Any) -> Generate:
    params = SamplingParams(max_new_tokens=6, temperature=0.0, ignore_eos=True, **fields)
    return Generate(rid, [7, 8, len(rid)], params, LogprobParams(), 0, None, None, 0.0, processor=processor)


def finish(core: EngineCore, look: Any = lambda output: None) -> tuple[dict[str, list[int]], dict[str, Any]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Any] = {}
    while core.has_work or core.awaits_grammars:
        core.take_grammars()
        core.turn()
        for batch in core.take_news():
            for rid, new in batch.tokens():
                tokens.setdefault(rid, []).extend(new)
            for output in batch.detailed:
                look(output)
            ends |= {output.rid: output.finish_reason for output in batch.detailed if output.finish_reason}
        core.scheduler.check_invariants()
    return tokens, ends


@pytest.mark.parametrize(("platform", "plain"), [("null", False), ("null", True), ("cpu", False), ("mlx", False)])
def test_each_token_is_as_the_processor_says(start: Any, platform: str, plain: bool) -> None:
    if platform == "mlx":
        pytest.importorskip("mlx.core")
    core = start(platform, disable_overlap_schedule=plain)
    core.add(generate("plain", None))
    alone, _ = finish(core)
    core.add(generate("plain", None))
    core.add(generate("counted", ("counting", '{"start": 40}')))
    core.add(generate("biased", ("counting", '{"start": 100}'), logit_bias={101: -math.inf, 9: 1.0}))
    tokens, ends = finish(core)
    assert tokens["plain"] == alone["plain"]
    assert tokens["counted"] == [40, 41, 42, 43, 44, 45]
    assert tokens["biased"][0] == 100
    assert tokens["biased"][1] != 101, "what the request forbids stays forbidden"
    assert tokens["biased"][2:] == [102, 103, 104, 105]
    assert {end.kind for end in ends.values()} == {FinishKind.LENGTH}


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("params", "message"),
    [
        ('{"after": 2}', "IndexError"),
        ('{"after": 0, "gives": {"999999": 1}}', "token ids are between 0 and"),
        ('{"after": 1, "gives": {"3": 1e9}}', "a number up to 1e6"),
        ('{"after": 0, "gives": 5}', "AttributeError"),
    ],
)
def test_a_processor_that_fails_ends_its_request_only(start: Any, plain: bool, params: str, message: str) -> None:
    core = start(disable_overlap_schedule=plain)
    core.add(generate("failing", ("failing", params)))
    core.add(generate("counted", ("counting", '{"start": 40}')))
    tokens, ends = finish(core)
    assert ends["failing"].kind is FinishKind.ERROR
    assert "Its logit processor failed" in ends["failing"].message
    assert message in ends["failing"].message
    assert set(tokens.get("failing", [])) <= {65}, "no token is given that the processor did not see"
    assert tokens["counted"] == [40, 41, 42, 43, 44, 45]


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("none", "{}", "There is no logit processor 'none'. Installed: all, broken, counting"),
        ("cbuiltins\neval", "{}", "code in a request is never run"),
        ("broken", "{}", "cannot be loaded: ImportError: no such thing"),
        ("counting", "{}", "does not take these parameters: KeyError: 'start'"),
    ],
)
def test_what_cannot_be_made_is_refused(name: str, params: str, message: str) -> None:
    with pytest.raises(RequestError, match="logit processor") as caught:
        LogitProcessors(100, POINTS).make(name, params)
    assert message in str(caught.value)
    assert caught.value.param == "custom_logit_processor"


def log_softmax(logits: Any) -> Any:
    values = logits.astype(np.float64)
    return values - values.max() - np.log(np.exp(values - values.max()).sum())


@pytest.mark.parametrize(("platform", "plain"), [("null", False), ("null", True), ("cpu", False), ("mlx", False)])
def test_one_that_sees_logits_decides_by_them(start: Any, platform: str, plain: bool) -> None:
    """Its rows get the tokens that it makes the likeliest; rows beside it, and logprobs, stay the model's."""
    if platform == "mlx":
        pytest.importorskip("mlx.core")
    core = start(platform, disable_overlap_schedule=plain)
    core.add(generate("plain", None))
    alone, _ = finish(core)
    SEEN.clear()
    core.add(generate("plain", None))
    core.add(replace(generate("second", ("second", "{}")), logprobs=LogprobParams(output=True)))
    core.add(generate("counted", ("counting", '{"start": 40}')))
    core.add(generate("ramp", ("ramp", '{"top": 77}'), logit_bias={77: -math.inf, 70: 6.5}))
    logprobs: list[float] = []
    tokens, ends = finish(core, lambda output: logprobs.extend(one.logprob for one in output.logprobs))
    assert {end.kind for end in ends.values()} == {FinishKind.LENGTH}
    assert tokens["plain"] == alone["plain"]
    assert tokens["counted"] == [40, 41, 42, 43, 44, 45]
    assert tokens["ramp"] == [70] * 6, (
        "biases are added to what it gives: 70 + 6.5 is more than 76, and 77 is forbidden"
    )
    (seen,) = SEEN
    assert tokens["second"] == [int(np.argsort(-logits, kind="stable")[1]) for logits in seen]
    own = [logits if platform == "null" else log_softmax(logits) for logits in seen]
    wanted = [of_step[token] for of_step, token in zip(own, tokens["second"], strict=True)]
    assert logprobs == pytest.approx(wanted, abs=1e-4)
    core.scheduler.check_invariants()


@pytest.mark.parametrize("platform", ["null", "cpu"])
def test_grammars_and_draws_act_on_given_logits(start: Any, platform: str) -> None:
    core = start(platform)
    grammar = GrammarSpec(kind=GrammarKind.REGEX, text="[a-f]{6}")
    core.add(generate("held", ("ramp", '{"top": 255}'), grammar=grammar))
    core.add(replace(generate("drawn", ("ramp", '{"top": 60, "step": 1e-6}')), sampling=DRAWN))
    tokens, _ = finish(core)
    held = core._tokenizer.decode(tokens["held"])
    assert held == "f" * 6
    assert max(tokens["drawn"]) <= 60
    assert len(set(tokens["drawn"])) > 3, "draws are draws"


DRAWN = SamplingParams(max_new_tokens=12, temperature=1.0, seed=3, ignore_eos=True)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(
    ("gives", "message"),
    [
        ("none", "a numpy array float32 [260], got NoneType"),
        ("short", "got float32 [259]"),
        ("doubles", "got float64 [260]"),
        ("list", "got list"),
        ("nan", "logits are numbers up to 1e6"),
        ("infinite", "logits are numbers up to 1e6"),
        ("nothing", "it forbids every token"),
        ("raises", "IndexError"),
    ],
)
def test_logits_that_are_none_end_their_request_only(start: Any, plain: bool, gives: str, message: str) -> None:
    core = start(disable_overlap_schedule=plain)
    core.add(generate("odd", ("odd", f'{{"gives": "{gives}"}}')))
    core.add(generate("counted", ("counting", '{"start": 40}')))
    tokens, ends = finish(core)
    assert ends["odd"].kind is FinishKind.ERROR
    assert message in ends["odd"].message
    assert not tokens.get("odd")
    assert tokens["counted"] == [40, 41, 42, 43, 44, 45]


@pytest.mark.parametrize("plain", [False, True])
def test_a_request_that_forbids_what_its_processor_leaves_is_told_so(start: Any, plain: bool) -> None:
    core = start(disable_overlap_schedule=plain)
    core.add(generate("seeing", ("ramp", '{"top": 0}'), logit_bias={0: -1e300}))
    core.add(generate("adding", ("all", '{"but": 3}'), logit_bias={3: -1e300}))
    core.add(generate("fine", ("ramp", '{"top": 0}'), logit_bias={1: -1e300}))
    tokens, ends = finish(core)
    assert ends["seeing"].code == ends["adding"].code == "no_token_allowed"
    assert "a logit processor together leaves no token" in ends["seeing"].message
    assert tokens["fine"] == [0] * 6


def test_biases_that_no_float32_holds_forbid_and_raise_nothing(start: Any) -> None:
    core = start()
    with np.errstate(over="raise"):
        core.add(generate("all", ("all", '{"but": 7}')))
        core.add(generate("twice", ("all", '{"but": 7}'), logit_bias={9: -3e38}))
        tokens, ends = finish(core)
    assert tokens["all"] == tokens["twice"] == [7] * 6
    assert {end.kind for end in ends.values()} == {FinishKind.LENGTH}


def test_only_rows_that_ask_are_copied(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    real = NullStep.logits

    def logits(step: NullStep, rows: Any) -> Any:
        asked.append(len(rows))
        return real(step, rows)

    monkeypatch.setattr(NullStep, "logits", logits)
    core = start()
    for rid in ("a", "b", "c"):
        core.add(generate(rid, None))
    core.add(generate("counted", ("counting", '{"start": 40}')))
    finish(core)
    assert not asked
    core.add(generate("a", None))
    core.add(generate("ramp", ("ramp", '{"top": 9}')))
    finish(core)
    assert asked == [1] * 6


@pytest.mark.parametrize("plain", [False, True])
def test_a_request_that_has_ended_is_asked_nothing_more(start: Any, plain: bool) -> None:
    """A step that was launched before its stop was known samples a token that is dropped."""
    core = start(disable_overlap_schedule=plain)
    SEEN.clear()
    stops = SamplingParams(max_new_tokens=50, temperature=0.0, ignore_eos=True, stop_token_ids=tuple(range(250)))
    core.add(replace(generate("second", ("second", "{}")), sampling=stops))
    tokens, ends = finish(core)
    assert ends["second"].kind is FinishKind.STOP
    assert len(SEEN[0]) == len(tokens["second"]) == 1


def test_platforms_that_show_no_logits_refuse_only_those_that_see_them() -> None:
    processors = LogitProcessors(100, POINTS, hidden="logits never leave the chip")
    processors.make("counting", '{"start": 1}')
    with pytest.raises(RequestError, match="sees logits, which this platform does not show: logits never leave") as one:
        processors.make("second", "{}")
    assert one.value.code == "unsupported_on_platform"


def test_requests_name_them() -> None:
    assert read_processor(None) is None
    assert read_processor("counting") == ("counting", "{}")
    assert read_processor({"name": "counting", "params": {"start": 1}}) == ("counting", '{"start": 1}')
    for wrong in (5, {}, {"name": 1}, {"name": "x", "params": []}, {"name": "x", "code": "y"}, ["x"]):
        with pytest.raises(RequestError, match="must be the name of an installed processor"):
            read_processor(wrong)


def test_they_are_off_unless_the_server_was_told() -> None:
    from cardan.engine.api import GenerateRequest

    request = GenerateRequest(input_ids=(1,), processor=("counting", "{}"))
    with pytest.raises(RequestError, match="--enable-custom-logit-processor") as caught:
        check_request(request, RequestLimits(vocab_size=100, platform="null"))
    assert caught.value.code == "feature_not_enabled"
    check_request(request, RequestLimits(vocab_size=100, platform="null", takes_processors=True))
