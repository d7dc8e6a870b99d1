"""Flags come from the config's dataclasses: names, defaults, types and help."""

from __future__ import annotations

import shlex
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from cyclopts import App

from cardan.cli.flags import (
    ENGINE_GROUPS,
    GROUPS,
    config_flags,
    read_config,
    read_sampling,
    sampling_flags,
    takes_flags,
)
from cardan.config import EngineConfig
from cardan.engine.native import sampling_from_dict
from cardan.errors import ConfigError
from cardan.types import SamplingParams

SGLANG_NAMES = shlex.split(
    "--schedule-policy --schedule-conservativeness --chunked-prefill-size --max-prefill-tokens "
    "--max-running-requests --max-total-tokens --mem-fraction-static --page-size "
    "--radix-eviction-policy --disable-radix-cache --enable-mixed-chunk --prefill-decode-interval "
    "--context-length --kv-cache-dtype --quantization --attention-backend --prefill-attention-backend "
    "--decode-attention-backend --stream-interval --enable-priority-scheduling "
    "--priority-scheduling-preemption-threshold --enable-metrics --enable-cache-report "
    "--served-model-name --api-key --host --port --tp-size --model-path --model"
)


def parse(tokens: list[str], groups: tuple[str, ...] = tuple(GROUPS)) -> EngineConfig:
    app = App(name="x", result_action="return_value")
    got: dict[str, Any] = {}

    @app.default
    @takes_flags((*config_flags(groups), *sampling_flags()))
    def command(**values: Any) -> None:
        got.update(values)

    app(tokens, exit_on_error=False, print_error=False)
    parse.sampling = read_sampling(got)  # type: ignore[attr-defined]
    return read_config(got)


def test_names_that_users_of_the_field_know_exist() -> None:
    names = {name for flag in config_flags(GROUPS) for name in flag.names}
    assert set(SGLANG_NAMES) <= names


def test_every_field_has_exactly_one_flag_with_help() -> None:
    flags = config_flags(GROUPS)
    expected = [(group, item.name) for group, cls in GROUPS.items() for item in fields(cls)]
    assert [(flag.group, flag.field) for flag in flags] == expected
    assert all(len(flag.help) > 8 and "``" not in flag.help for flag in flags)
    names = [name for flag in flags for name in flag.names]
    assert len(names) == len(set(names))


def test_groups_are_those_of_the_config() -> None:
    assert [item.name for item in fields(EngineConfig)] == list(GROUPS)
    assert all(is_dataclass(cls) for cls in GROUPS.values())
    assert set(ENGINE_GROUPS) | {"server"} == set(GROUPS)


def test_no_flags_give_the_default_config() -> None:
    assert parse([]) == EngineConfig()
    assert parse.sampling == {}  # type: ignore[attr-defined]


def test_flags_reach_their_fields() -> None:
    config = parse(
        shlex.split(
            "--model-path m --platform-option a=1 --platform-option b=2 --disable-radix-cache "
            "--chunked-prefill-size -1 --schedule-policy lof --no-enable-metrics --port 0 "
            "--mem-fraction-static 0.5 --random-seed 7"
        )
    )
    assert config.model.model == "m"
    assert config.platform.options == ("a=1", "b=2")
    assert config.cache.disable_radix_cache is True
    assert config.scheduler.chunked_prefill_size == -1
    assert config.scheduler.schedule_policy == "lof"
    assert config.server.enable_metrics is False
    assert config.server.port == 0
    assert config.cache.mem_fraction_static == 0.5
    assert config.scheduler.random_seed == 7


def test_every_flag_changes_its_field() -> None:
    """Walks all fields: a flag that is parsed and dropped would show here."""
    samples: dict[Any, tuple[str, Any]] = {
        bool: ("", None),
        int: ("3", 3),
        float: ("0.25", 0.25),
        str: ("text", "text"),
    }
    for flag in config_flags(GROUPS):
        if flag.kind is bool:
            token = [flag.names[0]] if not flag.default else ["--no-" + flag.names[0][2:]]
            expected: Any = not flag.default
        else:
            kinds = getattr(flag.kind, "__args__", (flag.kind,))
            if isinstance(kinds[0], str):
                expected = next(kind for kind in kinds if kind != flag.default)
                token = [flag.names[0], expected]
            else:
                text, expected = samples[kinds[0]]
                token = [flag.names[0], text]
                expected = (expected,) if flag.default == () else expected
        if flag.field in ("schedule_policy", "priority_scheduling_preemption_threshold"):
            token.append("--enable-priority-scheduling")
        token += {"log_request_contents": ["--log-requests"], "embedding_pooling": ["--is-embedding"]}.get(
            flag.field, []
        )
        config = parse(token)
        assert getattr(getattr(config, flag.group), flag.field) == expected, flag


def test_sampling_flags_reach_the_request() -> None:
    parse(shlex.split("--max-new-tokens 5 --temperature 0 --stop a --stop b --stop-token-ids 3 --ignore-eos --seed 9"))
    stated = parse.sampling  # type: ignore[attr-defined]
    assert set(stated) == {"max_new_tokens", "temperature", "stop", "stop_token_ids", "ignore_eos", "seed"}
    assert sampling_from_dict(stated) == SamplingParams(
        max_new_tokens=5, temperature=0.0, stop=("a", "b"), stop_token_ids=(3,), ignore_eos=True, seed=9
    )


def test_a_value_out_of_range_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="--port must be between"):
        parse(["--port", "70000"])
