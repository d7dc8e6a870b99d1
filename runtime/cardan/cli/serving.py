"""``cardan serve``: the HTTP server, with a start-up that can be followed."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rich.markup import escape

from cardan.cli.flags import GROUPS, config_flags, read_config, takes_flags
from cardan.cli.terminal import StartProgress, messages, set_up_logging, show_plan

if TYPE_CHECKING:
    from rich.console import Console

    from cardan.config import EngineConfig, ServerConfig
    from cardan.engine.children import Children
    from cardan.server import ServingInfo


@takes_flags(config_flags(GROUPS))
def serve(**values: Any) -> int:
    """Serve a model over HTTP (OpenAI and native endpoints)."""
    return serve_config(read_config(values))


def serve_config(config: EngineConfig) -> int:
    """Serve until a signal or the engine's end; returns the exit code."""
    from cardan.engine.children import Children

    children = Children()
    try:
        return _serve(config, children)
    finally:
        children.close()


def _serve(config: EngineConfig, children: Children) -> int:
    """Serve with processes that were started already, since what is imported here takes as long as what they do."""
    from cardan.engine import Frontend
    from cardan.server import serve as serve_http

    console = messages()
    if config.server.log_format == "json" or not console.is_terminal:
        log_to_standard_error(config.server)
    else:
        set_up_logging(config.server.log_level, console)
    progress = StartProgress(console)

    async def start_engine(wanted: EngineConfig) -> Frontend:
        return await Frontend.start(wanted, progress, children)

    def on_ready(serving: ServingInfo) -> None:
        progress.stop()
        if config.server.log_format == "json":
            log_ready(serving)
        else:
            show_ready(console, serving)

    with progress:
        return serve_http(config, on_ready=on_ready, start_engine=start_engine)


def log_to_standard_error(server: ServerConfig) -> None:
    """Log as the engine's other processes do."""
    from cardan.engine.process_log import log_handler

    logging.basicConfig(level=server.log_level.upper(), handlers=[log_handler("server", server)], force=True)


def log_ready(serving: ServingInfo) -> None:
    """One record with the plan, how long the start took, and where the server listens."""
    info = serving.engine
    fields = {"url": serving.url, "model": info.model_name, "plan": info.plan, "started_s": info.started_s}
    fields["answers"] = serving.answers
    logging.getLogger("cardan.server").info("ready", extra={"fields": fields})


def show_ready(console: Console, serving: ServingInfo) -> None:
    """Show the plan, how long the start took, and where the server listens."""
    info = serving.engine
    show_plan(console, info.plan)
    parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in info.started_s.items() if part != "total")
    console.print(f"[bold]start[/]    {info.started_s.get('total', 0.0):.1f} s ({escape(parts)})")
    console.print(f"[bold]answers[/]  {escape(serving.answers)}")
    console.print(
        f"[bold green]ready[/]    {serving.url}/v1 serves {escape(info.model_name)}; "
        f"KV pool {info.max_total_tokens} tokens, context {info.context_length}. Ctrl-C stops."
    )
