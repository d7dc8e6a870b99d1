"""Logit processors of installed packages: they are named by requests, and say what is added before each token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cardan.config import CacheConfig, EngineConfig, ModelConfig, PlatformConfig, SchedulerConfig
from cardan.engine.core import EngineCore
from cardan.engine.logit_processors import LogitProcessors, read_processor
from cardan.engine.messages import Generate
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import prepare
from cardan.engine.validation import RequestLimits, check_request
from cardan.errors import RequestError
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


POINTS = [Point("counting", counting), Point("failing", failing), Point("broken", ImportError("no such thing"))]


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


def finish(core: EngineCore) -> tuple[dict[str, list[int]], dict[str, Any]]:
    tokens: dict[str, list[int]] = {}
    ends: dict[str, Any] = {}
    while core.has_work:
        core.turn()
        for batch in core.take_news():
            for rid, new in batch.tokens():
                tokens.setdefault(rid, []).extend(new)
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
        ("none", "{}", "There is no logit processor 'none'. Installed: broken, counting, failing"),
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
