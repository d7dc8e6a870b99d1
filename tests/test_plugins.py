"""General plugins: loading under guard, every hook exercised, and docs/plugins.md held to the code."""

from __future__ import annotations

import inspect
import re
import types
from pathlib import Path
from typing import Any

import pytest

from cardan.cache import EVICTION_POLICIES
from cardan.engine.extensions import apply_plugins
from cardan.errors import ConfigError, PluginError
from cardan.grammar import GRAMMAR_BACKENDS, choose_backend
from cardan.models import MODEL_FAMILIES, build_model
from cardan.parsers import (
    REASONING_FORMATS,
    TOOL_FORMATS,
    AnswerFormat,
    ParserContext,
    PlainParser,
    ReasoningFormat,
    ToolFormat,
    Wanted,
    check_tool_format,
    choose_parsers,
    read_answer,
)
from cardan.plugins import Hooks, hook_names, hookimpl, load_plugins
from cardan.scheduler import SCHEDULE_POLICIES, SchedulePolicy
from cardan.scheduler.ordering import fcfs
from cardan.weights.quantized import METHODS, CheckpointMethod, names_of
from cardan.weights.quantized.awq import AwqReader

DOCS = Path(__file__).parents[1] / "docs" / "plugins.md"


class FakeEntryPoint:
    def __init__(self, value: Any, name: str = "acme", dist: str = "acme-dist") -> None:
        self.name = name
        self.value = "acme:hooks"
        self.dist = types.SimpleNamespace(name=dist, version="1.2")
        self._loaded = value

    def load(self) -> Any:
        if isinstance(self._loaded, Exception):
            raise self._loaded
        return self._loaded


def plugin(**functions: Any) -> Any:
    """A module with marked functions, as a plugin is."""
    module = types.ModuleType("acme_hooks")
    for name, function in functions.items():
        function.__name__ = name
        setattr(module, name, hookimpl(function))
    return module


@pytest.fixture
def restored_registries() -> Any:
    registries: list[dict[str, Any]] = [
        MODEL_FAMILIES,
        SCHEDULE_POLICIES,
        EVICTION_POLICIES,
        GRAMMAR_BACKENDS,
        TOOL_FORMATS,
        REASONING_FORMATS,
        METHODS,
    ]
    before = [dict(registry) for registry in registries]
    yield
    for registry, values in zip(registries, before, strict=True):
        registry.clear()
        registry.update(values)


@pytest.mark.usefixtures("restored_registries")
def test_every_hook_reaches_its_registry() -> None:
    model, policy = object(), SchedulePolicy(fcfs)

    def rank(node: Any) -> tuple[int, ...]:
        return (0,)

    def add_models(register: Any) -> None:
        register("AcmeForCausalLM", lambda config, name, tensors: model)

    def add_schedule(register: Any) -> None:
        register("acme-order", policy)

    def add_eviction(register: Any) -> None:
        register("acme-rank", rank)

    calls, thoughts = ToolFormat(build=lambda context: PlainParser()), ReasoningFormat(opening="<a>", closing="</a>")

    def add_calls(register: Any) -> None:
        register("acme-calls", calls)

    def add_thoughts(register: Any) -> None:
        register("acme-thoughts", thoughts)

    def add_grammars(register: Any) -> None:
        register("acme-grammar", GRAMMAR_BACKENDS["llguidance"])

    method = CheckpointMethod(reader=AwqReader, aliases=("acme-other",))

    def add_methods(register: Any) -> None:
        register("acme-method", method)

    functions = {
        "register_checkpoint_methods": add_methods,
        "register_grammar_backends": add_grammars,
        "register_models": add_models,
        "register_schedule_policies": add_schedule,
        "register_eviction_policies": add_eviction,
        "register_tool_call_parsers": add_calls,
        "register_reasoning_parsers": add_thoughts,
    }
    assert set(functions) == set(hook_names()), "a hook that this test does not exercise"
    apply_plugins([FakeEntryPoint(plugin(**functions))])
    assert build_model({"architectures": ["AcmeForCausalLM"]}, "x", None) is model
    assert SCHEDULE_POLICIES["acme-order"] is policy
    assert EVICTION_POLICIES["acme-rank"] is rank
    assert names_of({"quant_method": "ACME-other"}) == ("acme-method", "acme-other")
    assert choose_backend("acme-grammar") == ("acme-grammar", "--grammar-backend")
    form = AnswerFormat(*choose_parsers("acme-calls", "acme-thoughts", ()))
    assert (form.tools, form.reasoning) == (calls, thoughts)
    answer = read_answer(form.parser(Wanted(tools=ParserContext())), "<a>x</a>y")
    assert (answer.reasoning, answer.content) == ("x", "y")


@pytest.mark.usefixtures("restored_registries")
@pytest.mark.parametrize(
    ("hook", "taken", "kind", "message"),
    [
        ("register_models", "LlamaForCausalLM", ConfigError, "LlamaForCausalLM, which is registered already"),
        ("register_checkpoint_methods", "awq", PluginError, "'awq' for quant_method, which is registered already"),
        ("register_schedule_policies", "lpm", PluginError, "'lpm' for --schedule-policy, which is registered already"),
        ("register_grammar_backends", "xgrammar", PluginError, "'xgrammar' for --grammar-backend, which is registered"),
        ("register_eviction_policies", "lru", PluginError, "'lru' for --radix-eviction-policy, which is registered"),
        ("register_tool_call_parsers", "hermes", PluginError, "'hermes' for --tool-call-parser, which is registered"),
        ("register_reasoning_parsers", "qwen3", PluginError, "'qwen3' for --reasoning-parser, which is registered"),
    ],
)
def test_a_name_that_is_taken_is_refused(hook: str, taken: str, kind: type[Exception], message: str) -> None:
    def register_something(register: Any) -> None:
        register(taken, object())

    with pytest.raises(kind, match=message):
        apply_plugins([FakeEntryPoint(plugin(**{hook: register_something}))])


@pytest.mark.usefixtures("restored_registries")
@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("<f>{name}", r"The marker '<f>f' is empty or part of another one"),
        ("{name}<f>", r"begins with none of the triggers \('<f',\)|The marker 'f<f>' is empty or part of another one"),
        ("<f", r"calls of two functions begin with the same"),
        ("[{name}]", r"'\[f\]' begins with none of the triggers \('<f',\)"),
        ("<f={name}>", None),
    ],
)
def test_frames_in_which_calls_cannot_be_told_apart_are_refused(before: str, message: str | None) -> None:
    def add_calls(register: Any) -> None:
        register(
            "acme-calls",
            ToolFormat(
                build=lambda context: PlainParser(),
                frames=lambda name: ((before.format(name=name), "</f>"),),
                starts=("<f",),
            ),
        )

    def apply() -> None:
        apply_plugins([FakeEntryPoint(plugin(register_tool_call_parsers=add_calls))])

    if message is None:
        apply()
        assert "acme-calls" in TOOL_FORMATS
        return
    with pytest.raises(PluginError, match=f"The frames of the format 'acme-calls'.* do not fit: .*(?:{message})"):
        apply()
    assert "acme-calls" not in TOOL_FORMATS


def test_frames_of_the_formats_that_are_built_in() -> None:
    for name, form in TOOL_FORMATS.items():
        check_tool_format(name, form)


def test_a_plugin_that_does_not_load_is_named_with_its_distribution() -> None:
    cause = ImportError("libacme missing")
    with pytest.raises(PluginError, match=r"'acme' \(acme-dist 1\.2, acme:hooks\) failed to load.*libacme") as caught:
        load_plugins([FakeEntryPoint(cause)])
    assert caught.value.__cause__ is cause
    assert "Repair or uninstall acme-dist" in str(caught.value)


def test_a_hook_that_does_not_exist_is_refused() -> None:
    def anything(register: Any) -> None: ...

    with pytest.raises(PluginError, match=r"does not fit.*register_kernels.*Hooks are register_models"):
        load_plugins([FakeEntryPoint(plugin(register_kernels=anything))])


def test_a_hook_with_other_arguments_is_refused() -> None:
    def wrong(registry: Any) -> None: ...

    with pytest.raises(PluginError, match=r"does not fit.*registry"):
        load_plugins([FakeEntryPoint(plugin(register_models=wrong))])


def test_a_plugin_without_hooks_is_refused() -> None:
    with pytest.raises(PluginError, match=r"implements no hook\. Mark functions with cardan\.plugins\.hookimpl"):
        load_plugins([FakeEntryPoint(types.ModuleType("empty"))])


def test_no_plugins_is_fine() -> None:
    assert load_plugins([]).get_plugins() == set()


def test_the_docs_have_every_hook_with_its_exact_signature() -> None:
    text = DOCS.read_text()
    headings = re.findall(r"^#### (\w+)$", text, re.MULTILINE)
    assert headings == list(hook_names())
    for name in hook_names():
        signature = inspect.signature(getattr(Hooks, name))
        parameters = list(signature.parameters.values())[1:]
        written = f"def {name}{signature.replace(parameters=parameters)}".replace("'", "")
        assert f"#### {name}\n\n```python\n{written}\n```\n" in text, written
        assert inspect.getdoc(getattr(Hooks, name)), f"{name} has no docstring"


def test_the_docs_name_what_exists() -> None:
    """Dotted names in the text resolve, so that a rename cannot leave it teaching what is gone."""
    import importlib

    for dotted in sorted(set(re.findall(r"`(cardan(?:\.\w+)+)`", DOCS.read_text()))):
        if dotted in ("cardan.platforms", "cardan.plugins", "cardan.logit_processors"):
            continue
        module, _, name = dotted.rpartition(".")
        try:
            importlib.import_module(dotted)
        except ImportError:
            assert hasattr(importlib.import_module(module), name), dotted
