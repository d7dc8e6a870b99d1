"""``cardan bench``: load on an engine in this process or on a server, and the scheduler alone."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from cardan.bench.load import EngineTarget, Target, run_load
from cardan.bench.measure import BenchReport, RequestRecord, Spread, parse_goodput, summarize
from cardan.bench.workload import Shape, make_workload
from cardan.cli.flags import ENGINE_GROUPS, config_flags, log_level_flag, read_config, takes_flags
from cardan.cli.terminal import StartProgress, messages, results, set_up_logging, show_pairs
from cardan.errors import CardanError, ConfigError

if TYPE_CHECKING:
    from cardan.bench.profile import StepProfile

app = App(name="bench", help="Measure an engine, a server, or the scheduler alone.", result_action="return_value")

HTTP_VOCAB = 10_000
"""Prompts for a server that does not tell its vocabulary draw their ids below this; real ones are larger."""


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """What a benchmark sends and reports."""

    num_prompts: Annotated[int, Parameter(help="Number of requests.")] = 16
    random_input_len: Annotated[
        int, Parameter(name=("--random-input-len", "--own"), help="Prompt tokens of each request's own.")
    ] = 512
    random_output_len: Annotated[int, Parameter(help="Tokens that each request generates.")] = 128
    random_range_ratio: Annotated[
        float, Parameter(help="Draw lengths from this share of the length up to the length; 1 makes all equal.")
    ] = 1.0
    shared_prefix: Annotated[int, Parameter(help="Tokens that all prompts begin with.")] = 0
    request_rate: Annotated[float, Parameter(help="Requests per second, at random; inf sends all at once.")] = math.inf
    max_concurrency: Annotated[int | None, Parameter(help="Most requests at once; no limit by default.")] = None
    warmup: Annotated[int, Parameter(help="Requests that run before and are not measured.")] = 1
    bench_seed: Annotated[int, Parameter(help="Seed of ids, lengths and arrivals.")] = 0
    goodput: Annotated[str | None, Parameter(help="Limits in milliseconds, such as ttft:300,tpot:50.")] = None
    output_json: Annotated[Path | None, Parameter(help="Write the report to this file too.")] = None

    def shape(self) -> Shape:
        """The workload in numbers."""
        return Shape(
            num_prompts=self.num_prompts,
            input_len=self.random_input_len,
            output_len=self.random_output_len,
            shared_prefix=self.shared_prefix,
            range_ratio=self.random_range_ratio,
            request_rate=self.request_rate,
            seed=self.bench_seed,
        )


@app.default
@takes_flags((*config_flags(ENGINE_GROUPS), log_level_flag()))
def load(
    *,
    flags: LoadFlags = LoadFlags(),
    base_url: Annotated[str | None, Parameter(help="Measure this server instead of an engine here.")] = None,
    http_model: Annotated[str | None, Parameter(help="Model that HTTP requests name; the server's first.")] = None,
    http_api_key: Annotated[str | None, Parameter(help="API key of the server.")] = None,
    **values: Any,
) -> int:
    """Send a workload to an engine in this process, or to a server with --base-url."""
    limits = parse_goodput(flags.goodput) if flags.goodput is not None else None
    if flags.max_concurrency is not None and flags.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency must be at least 1, got {flags.max_concurrency}.")
    if flags.warmup < 0:
        raise ConfigError(f"--warmup must be 0 or more, got {flags.warmup}.")
    _check_flags(base_url, {"--http-model": http_model, "--http-api-key": http_api_key}, values)
    console = messages()
    if base_url is not None:
        records, about = asyncio.run(_load_server(flags, base_url, http_model, http_api_key, console))
    else:
        records, about = asyncio.run(_load_engine(flags, values, console))
    report = summarize(records, limits)
    show_report(results(), report)
    if flags.output_json is not None:
        shape = {**asdict(flags.shape()), "request_rate": str(flags.request_rate)}
        value = {"target": about, "workload": shape, "max_concurrency": flags.max_concurrency, **report.to_json()}
        flags.output_json.write_text(json.dumps(value, indent=2) + "\n")
    return 1 if report.failed else 0


def _check_flags(base_url: str | None, http: Mapping[str, str | None], engine: Mapping[str, Any]) -> None:
    if base_url is None:
        for flag, value in http.items():
            if value is not None:
                raise ConfigError(f"{flag} has no effect without --base-url, got {value!r}. Drop it, or pass both.")
        return
    if engine:
        named = ", ".join("--" + key.partition("__")[2].replace("_", "-") for key in engine)
        raise ConfigError(
            f"With --base-url the server decides how it runs, so {named} has no effect. "
            "Drop it here and pass it to the server; --http-model names the model."
        )


async def _load_engine(
    flags: LoadFlags, values: Mapping[str, Any], console: Console
) -> tuple[list[RequestRecord], dict[str, Any]]:
    from cardan.engine import Frontend

    config = read_config({"server__log_level": "warning", **values})
    set_up_logging(config.server.log_level, console)
    with StartProgress(console) as progress:
        engine = await Frontend.start(config, progress)
    async with engine:
        records = await _measure(EngineTarget(engine), flags, engine.info.vocab_size, console)
        return records, {"kind": "engine", "model": engine.info.model_name, "plan": dict(engine.info.plan)}


async def _load_server(
    flags: LoadFlags, base_url: str, model: str | None, api_key: str | None, console: Console
) -> tuple[list[RequestRecord], dict[str, Any]]:
    from cardan.bench.http import HttpTarget

    async with HttpTarget(base_url, model, api_key) as target:
        records = await _measure(target, flags, await target.vocab_size() or HTTP_VOCAB, console)
        return records, {"kind": "server", "base_url": base_url, "model": target.model}


async def _measure(target: Target, flags: LoadFlags, vocab_size: int, console: Console) -> list[RequestRecord]:
    warmup = make_workload(Shape(num_prompts=max(flags.warmup, 1), input_len=16, output_len=4, seed=1), vocab_size)
    for request in warmup[: flags.warmup]:
        for record in await run_load(target, [request]):
            if record.error is not None:
                raise CardanError(f"The warm-up request failed: {record.error}")
    workload = make_workload(flags.shape(), vocab_size)
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(workload))
        return await run_load(target, workload, flags.max_concurrency, lambda _: progress.advance(task))


def show_report(console: Console, report: BenchReport) -> None:
    """Show a report as a table."""
    pairs = [
        ("requests", f"{report.completed} answered, {report.failed} failed in {report.duration_s:.2f} s"),
        ("prompt tokens", f"{report.prompt_tokens} ({report.cached_tokens} cached); {_lengths(report.input_lens)}"),
        ("output tokens", f"{report.completion_tokens}; {_lengths(report.output_lens)}"),
        ("throughput", f"{report.output_throughput:.1f} output tok/s, {report.input_throughput:.1f} prompt tok/s"),
        ("requests/s", f"{report.request_throughput:.2f}"),
        ("TTFT ms", _spread(report.ttft_ms)),
        ("TPOT ms", _spread(report.tpot_ms)),
        ("ITL ms", _spread(report.itl_ms)),
        ("e2e ms", _spread(report.e2e_ms)),
    ]
    if report.goodput is not None:
        pairs.append(("goodput", f"{report.goodput:.2f} requests/s within the limits"))
    pairs += [("error", error) for error in report.errors]
    show_pairs(console, pairs)


def _lengths(lengths: tuple[int, float, int]) -> str:
    least, mean, most = lengths
    return f"{least} each" if least == most else f"{least} to {most}, mean {mean:.0f}"


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"median {spread.median:.1f}, p90 {spread.p90:.1f}, p99 {spread.p99:.1f}, mean {spread.mean:.1f}"


@app.command
def scheduler(
    *,
    rows: Annotated[tuple[int, ...], Parameter(help="Running requests; may be given several times.", negative="")] = (
        1,
        8,
        64,
        256,
    ),
    steps: Annotated[int, Parameter(help="Decode steps that are measured.")] = 200,
    page_size: Annotated[int, Parameter(help="Tokens per page.")] = 1,
    as_json: Annotated[bool, Parameter(name="--json", help="Print JSON.", negative="")] = False,
) -> None:
    """Measure the scheduler's own time for a decode step (plan and commit), without any device."""
    from cardan.bench.scheduler_time import measure_scheduler

    times = [measure_scheduler(count, steps, page_size) for count in rows]
    console = results()
    if as_json:
        console.print_json(data=[asdict(one) for one in times])
        return
    table = Table("rows", "plan µs", "commit µs", "together µs", "p99 µs", box=None, header_style="bold")
    for one in times:
        cells = (one.plan_us, one.commit_us, one.total_us, one.p99_us)
        table.add_row(str(one.rows), *(f"{value:.1f}" for value in cells))
    console.print(table)


@app.command
@takes_flags((*config_flags(ENGINE_GROUPS), log_level_flag()))
def profile(
    *,
    prompt_len: Annotated[int, Parameter(help="Tokens of the prompt whose prefill is taken apart.")] = 512,
    rows: Annotated[
        tuple[int, ...], Parameter(help="Rows of decode steps; may be given several times.", negative="")
    ] = (
        1,
        8,
    ),
    steps: Annotated[int, Parameter(help="Decode steps that are measured.")] = 32,
    output_json: Annotated[Path | None, Parameter(help="Write the profile to this file too.")] = None,
    **values: Any,
) -> None:
    """Show where the time of a step goes: ops of the device one by one, and the host's work around them."""
    from cardan.bench.profile import profile as measure

    console = messages()
    config = read_config({"server__log_level": "warning", **values})
    set_up_logging(config.server.log_level, console)
    with StartProgress(console) as progress:
        found, about = measure(config, prompt_len=prompt_len, rows=rows, steps=steps, on_part=progress)
    for one in found:
        show_profile(results(), one)
    if output_json is not None:
        value = {"about": about, "profiles": [one.to_json() for one in found]}
        output_json.write_text(json.dumps(value, indent=2) + "\n")


def show_profile(console: Console, profile: StepProfile) -> None:
    """Show one kind of step as a table."""
    title = f"{profile.kind}, {profile.rows} rows, {profile.tokens} tokens: {profile.step_us / 1000:.2f} ms a step"
    console.print(f"{title} ({profile.untimed_us / 1000:.2f} without timing each op; mean of {profile.steps})")
    table = Table("part", "calls", "µs", "share", "GB/s", "GFLOP/s", box=None, header_style="bold")
    for op in profile.ops:
        rates = ("" if rate is None else f"{rate:.1f}" for rate in (op.gb_s, op.gflop_s))
        table.add_row(op.name, f"{op.calls:g}", f"{op.us:.1f}", f"{op.share:.1%}", *rates)
    for name, part_us in profile.host.items():
        table.add_row(f"host: {name}", "1", f"{part_us:.1f}", f"{part_us / profile.step_us:.1%}", "", "")
    console.print(table)
    console.print()
