"""Grammars through real processes: outputs that conform, both loops, jumps, crowds, refusals, aborts."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cardan.engine import Engine, Frontend
from cardan.engine.api import GenerateRequest
from cardan.engine.options import config_from_options
from cardan.errors import RequestError
from cardan.grammar_spec import GrammarKind, GrammarSpec
from cardan.platform.discovery import survey
from cardan.testing import write_tiny_model
from cardan.types import FinishKind, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["a rather long constant", "another one that is long"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["name", "kind", "age", "tags"],
    "additionalProperties": False,
}
USABLE = {status.plugin.name for status in survey() if status.availability and status.availability.usable}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("grammars") / "tiny")


def options(tiny: Path, platform: str, **changes: Any) -> dict[str, Any]:
    weights = {} if platform == "null" else {"random_weights": 1, "dtype": "float32"}
    base = {"model": str(tiny), "platform": platform, "max_total_tokens": 8192, "random_seed": 1, "log_level": "error"}
    return {**base, **weights, **changes}


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[Engine]:
    with Engine(**options(tiny, "null", json_whitespace="none")) as started:
        yield started


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    kinds = ["string", "integer", "boolean", "enum", "null", "number"]
    kind = rng.choice([*kinds, "object", "array", "anyOf"] if depth < 2 else kinds)
    match kind:
        case "string":
            return {"type": "string", "maxLength": rng.randrange(1, 8)}
        case "integer" | "number":
            return {"type": kind, "minimum": rng.randrange(-9, 3), "maximum": rng.randrange(3, 2000)}
        case "enum":
            return {"enum": rng.sample(["red", 12, None, True, "a b", 0], 3)}
        case "object":
            names = rng.sample(["a", "bc", "name", "x y"], rng.randrange(1, 4))
            properties = {name: random_schema(rng, depth + 1) for name in names}
            required = names[: rng.randrange(len(names) + 1)]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "array":
            return {"type": "array", "items": random_schema(rng, depth + 1), "minItems": 1, "maxItems": 3}
        case "anyOf":
            return {"anyOf": [random_schema(rng, depth + 1), {"type": "null"}]}
    return {"type": kind}


def test_every_output_of_a_random_schema_conforms(engine: Engine) -> None:
    rng = random.Random(7)
    schemas = [random_schema(rng) for _ in range(60)]
    asked = [
        {"temperature": 1.0, "max_new_tokens": 300, "seed": index, "json_schema": schema}
        for index, schema in enumerate(schemas)
    ]
    answers = engine.generate([f"prompt {index}" for index in range(len(asked))], asked)
    finished = 0
    for schema, answer in zip(schemas, answers, strict=True):
        if answer["meta_info"]["finish_reason"]["type"] == "stop":
            finished += 1
            jsonschema.validate(json.loads(answer["text"]), schema)
    assert finished > 50


def mixed_requests() -> list[dict[str, Any]]:
    kinds: list[dict[str, Any]] = [
        {"json_schema": PERSON},
        {"regex": "(yes|no), [0-9]{3} and a long constant tail"},
        {},
        {"choice": ["one of a few", "another of a few"]},
        {"ebnf": 'root ::= "value: " [a-z]+ ";"'},
        {"json_schema": json.dumps(PERSON), "return": 1},
    ]
    return [{"temperature": 0, "max_new_tokens": 60, **kind} for kind in kinds for _ in range(2)]


def outputs(engine: Engine) -> tuple[list[Any], list[Any]]:
    """Answers of a crowd, and of each alone."""
    asked = [{name: value for name, value in one.items() if name != "return"} for one in mixed_requests()]
    prompts = [f"prompt number {index}" for index in range(len(asked))]
    crowd = engine.generate(prompts, asked)
    alone = [engine.generate(prompt, params) for prompt, params in zip(prompts, asked, strict=True)]
    return [one["output_ids"] for one in crowd], [one["output_ids"] for one in alone]


@pytest.mark.parametrize(
    "platform", ["null", pytest.param("cpu", marks=pytest.mark.slow), pytest.param("mlx", marks=pytest.mark.slow)]
)
def test_crowds_loops_and_jumps_change_no_token(tiny: Path, platform: str) -> None:
    if platform not in USABLE:
        pytest.skip(f"{platform} cannot be used here")
    seen: list[Any] = []
    ways: tuple[dict[str, Any], ...] = (
        {},
        {"disable_overlap_schedule": True},
        {"disable_jump_forward": True},
        {"page_size": 16, "max_running_requests": 3},
    )
    for way in ways if platform == "null" else ways[:1] + ways[2:]:
        with Engine(**options(tiny, platform, json_whitespace="none", **way)) as engine:
            crowd, alone = outputs(engine)
            seen += [crowd, alone]
    assert all(one == seen[0] for one in seen)


@pytest.mark.slow
def test_a_crowd_on_torch_kernels_gives_what_each_gets_alone(tiny: Path) -> None:
    pytest.importorskip("torch")
    with Engine(**options(tiny, "cpu", platform_options=("kernels=torch",))) as engine:
        crowd, alone = outputs(engine)
    assert crowd == alone


def test_ends_and_lengths(engine: Engine) -> None:
    asked = {"temperature": 0, "max_new_tokens": 40, "regex": "abc 1234"}
    done = engine.generate("x", {**asked, "ignore_eos": True, "min_new_tokens": 30})
    assert done["text"] == "abc 1234"
    assert done["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    cut = engine.generate("x", {**asked, "max_new_tokens": 2})
    assert cut["meta_info"]["finish_reason"]["type"] == "length"
    assert cut["meta_info"]["completion_tokens"] == 2
    stopped = engine.generate("x", {**asked, "stop": ["12"]})
    assert stopped["text"] == "abc "
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": "12"}
    logprobs = engine.generate("x", asked, return_logprob=True)
    assert logprobs["text"] == "abc 1234"
    ids = logprobs["output_ids"]
    assert [entry[1] for entry in logprobs["meta_info"]["output_token_logprobs"]] == ids == done["output_ids"]


def test_choices_differ_and_seeds_repeat(engine: Engine) -> None:
    asked = {"temperature": 1, "max_new_tokens": 40, "n": 4, "seed": 5, "regex": "[a-z]{12}"}
    texts = [[one["text"] for one in engine.generate("x", asked)] for _ in range(2)]
    assert texts[0] == texts[1]
    assert len(set(texts[0])) > 1
    assert all(re.fullmatch("[a-z]{12}", text) for text in texts[0])


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"regex": "(a"}, "regex", "unclosed group"),
        ({"json_schema": {"not": {}}}, "json_schema", "not (at /not)"),
        ({"json_schema": "{"}, "json_schema", "not valid JSON"),
        ({"regex": "a", "ebnf": "b"}, "ebnf", "at most one"),
        ({"ebnf": "start: foo"}, "ebnf", "unknown name"),
        ({"regex": "a", "n": 3, "stop": ["x"], "ebnf": None, "min_p": 0.1, "choice": []}, "choice", "at least one"),
    ],
)
def test_wrong_grammars_are_refused_as_requests_and_the_engine_goes_on(
    engine: Engine, asked: dict[str, Any], param: str, message: str
) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(RequestError, match=re.escape(message)) as caught:
            engine.generate("x", asked)
        assert caught.value.param == param
    assert engine.generate("x", {"regex": "ok", "max_new_tokens": 9})["text"] == "ok"


def test_without_a_backend_a_grammar_is_refused(tiny: Path) -> None:
    with (
        Engine(**options(tiny, "null", grammar_backend="none")) as engine,
        pytest.raises(RequestError, match="no grammar backend"),
    ):
        engine.generate("x", {"regex": "a"})


async def test_requests_are_aborted_while_their_grammar_is_compiled_and_counted(tiny: Path) -> None:
    wide = {"type": "object", "properties": {f"key{i}": {"enum": [f"v{i}{j}" for j in range(9)]} for i in range(900)}}
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(wide))
    async with await Frontend.start(config_from_options(options(tiny, "null"))) as frontend:
        slow = GenerateRequest(input_ids=(5, 6), sampling=SamplingParams(grammar=spec), rid="slow")
        task = asyncio.ensure_future(anext(frontend.generate(slow)))
        while (await frontend.stats()).num_grammar_queued == 0 and not task.done():
            await asyncio.sleep(0)
        await frontend.abort("slow")
        output = await asyncio.wait_for(task, 30)
        assert output.finish_reason is None or output.finish_reason.kind in (FinishKind.ABORT, FinishKind.LENGTH)
        params = SamplingParams(grammar=GrammarSpec(kind=GrammarKind.REGEX, text="ab[0-9]"), max_new_tokens=9)
        async for _ in frontend.generate(GenerateRequest(input_ids=(5, 6), sampling=params)):
            pass
        stats = await frontend.stats()
        assert stats.num_grammar_queued == 0
        assert stats.totals["grammar_compiled"] >= 1
        assert "grammar_compile_ms" in stats.totals


async def test_a_grammar_that_takes_too_long_fails_while_others_run(tiny: Path) -> None:
    wide = {"type": "object", "properties": {f"key{i}": {"enum": [f"v{i}{j}" for j in range(20)]} for i in range(900)}}
    spec = GrammarSpec(kind=GrammarKind.JSON_SCHEMA, text=json.dumps(wide))
    config = config_from_options(options(tiny, "null", grammar_compile_timeout_s=1e-4))
    async with await Frontend.start(config) as frontend:
        slow = GenerateRequest(input_ids=(5, 6), sampling=SamplingParams(grammar=spec))

        async def fails() -> None:
            with pytest.raises(RequestError, match=r"longer than 0\.0001 s"):
                await anext(frontend.generate(slow))

        async def runs() -> int:
            plain = GenerateRequest(input_ids=(5, 6), sampling=SamplingParams(max_new_tokens=20))
            return sum([len(output.token_ids) async for output in frontend.generate(plain)])

        _, count = await asyncio.gather(fails(), runs())
        assert count == 20
