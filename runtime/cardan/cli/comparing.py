"""``cardan accuracy``: record what a model says on one platform, and compare it with another."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from cardan.accuracy.attribution import attribute
from cardan.accuracy.cases import bundled_texts, read_texts
from cardan.accuracy.comparison import Comparison, compare
from cardan.accuracy.golden import Golden, read_golden
from cardan.accuracy.noise import POSITIONS
from cardan.accuracy.recording import TOP, Wanted, record
from cardan.accuracy.report import render
from cardan.accuracy.verdict import Verdict
from cardan.cli.comparison_text import show_comparison, show_record
from cardan.cli.evaluating import evaluate_command
from cardan.cli.flags import ENGINE_GROUPS, config_flags, log_level_flag, takes_flags
from cardan.cli.measuring import Bars, check_apart, check_writable, measured_config
from cardan.cli.terminal import messages, results, set_up_logging
from cardan.config import EngineConfig
from cardan.errors import ConfigError

app = App(
    name="accuracy",
    help="Tell whether a model is the same on another platform.",
    result_action="return_value",
)

app.command(evaluate_command, name="eval")

EXIT_CODES = {Verdict.SAME: 0, Verdict.DRIFT: 3, Verdict.DIFFERENT: 4}
"""Exit codes of a comparison; 1 and 2 are errors, as with every command."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class RecordFlags:
    """What a record is to hold."""

    prompts: Annotated[Path | None, Parameter(help="Prompts of your own, as JSON; else those that come along.")] = None
    top: Annotated[int, Parameter(help="Likeliest tokens kept at each position.")] = TOP
    positions: Annotated[int | None, Parameter(help="Most positions to score; all prompts are shortened.")] = None
    whole_layer: Annotated[
        tuple[str, ...], Parameter(help="A layer's result to keep whole, such as layers.3.mlp_norm.")
    ] = ()
    layers: Annotated[bool, Parameter(help="Fingerprint the results of layers.")] = True
    noise: Annotated[bool, Parameter(help="Measure this platform's own variation.")] = True
    noise_positions: Annotated[
        int | None, Parameter(help=f"Most positions that it is measured on, {POSITIONS} by default.")
    ] = None
    semantics: Annotated[bool, Parameter(help="Try whether draws follow request parameters.")] = True
    source: Annotated[
        str,
        Parameter(name="--from", help="Who is asked: cardan, transformers, or the URL of a server of completions."),
    ] = "cardan"
    server_model: Annotated[str | None, Parameter(help="Model that requests to such a server name; its first.")] = None
    server_api_key: Annotated[str | None, Parameter(help="API key of such a server.")] = None

    def without_effect(self) -> list[str]:
        """Flags that were given and that only an engine of Cardan's heeds."""
        given = {
            "--whole-layer": bool(self.whole_layer),
            "--no-layers": not self.layers,
            "--no-noise": not self.noise,
            "--noise-positions": self.noise_positions is not None,
            "--no-semantics": not self.semantics,
        }
        return [flag for flag, is_given in given.items() if is_given]

    def wanted(self) -> Wanted:
        """The same, read and checked."""
        return Wanted(
            texts=bundled_texts() if self.prompts is None else read_texts(self.prompts),
            top=self.top,
            positions=self.positions,
            layers=self.layers,
            whole=self.whole_layer,
            noise=self.noise,
            noise_positions=_noise_positions(self),
            semantics=self.semantics,
        )


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class CompareFlags:
    """What a comparison measures and writes."""

    json_file: Annotated[Path | None, Parameter(name="--json", help="Write all numbers to this file.")] = None
    html_file: Annotated[Path | None, Parameter(name="--html", help="Write a page to this file.")] = None
    noise: Annotated[bool, Parameter(help="Measure this platform's own variation.")] = True
    noise_positions: Annotated[
        int | None, Parameter(help=f"Most positions that it is measured on, {POSITIONS} by default.")
    ] = None
    semantics: Annotated[bool, Parameter(help="Try whether draws follow request parameters.")] = True
    attribute: Annotated[bool, Parameter(negative="", help="Find out which feature carries a difference.")] = False

    def without_effect(self) -> list[str]:
        """Flags that were given and need an engine."""
        given = {
            "--no-noise": not self.noise,
            "--noise-positions": self.noise_positions is not None,
            "--no-semantics": not self.semantics,
            "--attribute": self.attribute,
        }
        return [flag for flag, is_given in given.items() if is_given]


@app.command(name="record")
@takes_flags((*config_flags(ENGINE_GROUPS), log_level_flag()))
def record_command(
    *,
    out: Annotated[Path, Parameter(help="The file to write.")],
    flags: RecordFlags = RecordFlags(),
    **values: Any,
) -> int:
    """Run prompts through an engine as it serves, and keep what the model said in one file."""
    check_writable(out=out)
    config = measured_config(values)
    console = messages()
    set_up_logging(config.server.log_level, console)
    wanted = flags.wanted()
    with Bars(console) as bars:
        golden = _record_from(flags, config, wanted, bars)
    golden.write(out)
    show_record(results(), golden, out)
    return 0


def _record_from(flags: RecordFlags, config: EngineConfig, wanted: Wanted, bars: Bars) -> Golden:
    is_server = flags.source.lower().startswith(("http://", "https://"))
    if not is_server and (flags.server_model or flags.server_api_key):
        raise ConfigError("--server-model and --server-api-key need --from with a URL. Drop them, or name the server.")
    idle = flags.without_effect() if is_server or flags.source == "transformers" else []
    if idle:
        raise ConfigError(
            f"Records --from {flags.source} hold neither layers nor a noise floor nor request parameters, so "
            f"{', '.join(idle)} has no effect. Drop it."
        )
    if is_server:
        from cardan.accuracy.from_server import CompletionsServer, record_server

        with CompletionsServer(flags.source, flags.server_model, flags.server_api_key) as server:
            return record_server(config, server, wanted, bars)
    if flags.source == "transformers":
        from cardan.accuracy.from_transformers import record_transformers

        return record_transformers(config, wanted, bars)
    if flags.source != "cardan":
        raise ConfigError(
            f"--from must be cardan, transformers or a URL such as http://host:8000, got {flags.source!r}."
        )
    return record(config, wanted, bars)


@app.command(name="compare")
@takes_flags((*config_flags(ENGINE_GROUPS), log_level_flag()))
def compare_command(
    golden: Annotated[Path, Parameter(help="The record that is the truth.")],
    other: Annotated[Path | None, Parameter(help="A second record; without it an engine runs here.")] = None,
    /,
    *,
    flags: CompareFlags = CompareFlags(),
    **values: Any,
) -> int:
    """Compare a record with an engine run here, or with a second record; exits with 0, 3 (drift) or 4 (different)."""
    check_writable(json=flags.json_file, html=flags.html_file)
    check_apart((golden, other), json=flags.json_file, html=flags.html_file)
    truth = read_golden(golden)
    if other is not None:
        _check_alone(values, flags)
        compared = compare(truth, read_golden(other))
    else:
        config = measured_config(values)
        console = messages()
        set_up_logging(config.server.log_level, console)
        with Bars(console) as bars:
            compared = compare(truth, run_again(truth, config, bars, flags))
        if flags.attribute:
            compared = _attributed(truth, compared, config, flags)
    show_comparison(results(), compared)
    write(compared, flags.json_file, flags.html_file)
    return EXIT_CODES[compared.judgement.verdict]


def _attributed(truth: Golden, compared: Comparison, config: EngineConfig, flags: CompareFlags) -> Comparison:
    """A comparison with what carries the difference; should that fail, the comparison is shown and kept without."""
    write(compared, flags.json_file, flags.html_file)
    try:
        with Bars(messages()) as bars:
            return replace(compared, attribution=attribute(truth, compared, config, bars))
    except BaseException:
        show_comparison(results(), compared)
        raise


def _noise_positions(flags: RecordFlags | CompareFlags) -> int:
    """Most positions that the noise floor is measured on.

    Raises:
        ConfigError: they are given, and no floor is measured.
    """
    if flags.noise_positions is None:
        return POSITIONS
    if not flags.noise:
        raise ConfigError("With --no-noise, --noise-positions has no effect. Drop one of them.")
    return flags.noise_positions


def run_again(truth: Golden, config: EngineConfig, bars: Bars, flags: CompareFlags) -> Golden:
    """A record of the same sequences on another engine."""
    wanted = Wanted(
        cases=tuple(recorded.case for recorded in truth.cases),
        top=truth.top,
        layers=truth.layers is not None,
        noise=flags.noise,
        noise_positions=_noise_positions(flags),
        semantics=flags.semantics,
    )
    return record(config, wanted, bars)


def write(compared: Comparison, json_file: Path | None, html_file: Path | None) -> None:
    """Write a comparison where that was asked.

    Raises:
        ConfigError: a file cannot be written.
    """
    try:
        if html_file is not None:
            html_file.write_text(render(compared), encoding="utf-8")
        if json_file is not None:
            json_file.write_text(json.dumps(compared.to_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}. Choose another place.") from error


def _check_alone(values: dict[str, Any], flags: CompareFlags) -> None:
    named = ["--" + key.partition("__")[2].replace("_", "-") for key in values] + flags.without_effect()
    if named:
        raise ConfigError(
            f"Two records are compared without an engine, so {', '.join(named)} has no effect. "
            "Drop it, or the second file."
        )
