"""The commands of ``cardan`` and how their errors end the process.

Commands are imported when they run, so that a short one starts fast.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from cyclopts import App

from cardan import __version__
from cardan.cli.terminal import messages, show_error
from cardan.errors import CardanError, ConfigError, UnsupportedError

EXIT_FAILED = 1
EXIT_CONFIG = 2
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141

COMMANDS = {
    "serve": ("cardan.cli.serving:serve", "Serve a model over HTTP."),
    "generate": ("cardan.cli.generating:generate", "Continue prompts in the terminal."),
    "chat": ("cardan.cli.chatting:chat", "Chat with a model in the terminal."),
    "plan": ("cardan.cli.planning:plan", "Show what would run and why, without starting anything."),
    "platforms": ("cardan.cli.planning:platforms", "List the platforms, or what one of them can do."),
    "bench": ("cardan.cli.benching:app", "Measure an engine, a server, or the scheduler alone."),
    "replay": ("cardan.cli.replaying:replay", "Send the requests of a crash dump to a server again."),
    "tune": ("cardan.cli.tuning:tune", "Measure which kernels suit this processor, for later starts."),
    "conform": ("cardan.cli.conforming:conform", "Try a platform against float64 references."),
    "accuracy": ("cardan.cli.comparing:app", "Tell whether a model is the same on another platform."),
    "fetch": ("cardan.cli.planning:fetch", "Fetch a model ahead of its first use."),
    "version": ("cardan.cli.planning:version", "Print versions."),
}
"""Commands by name: where they stand, and a line of help."""


def make_app() -> App:
    """The command line as cyclopts sees it."""
    app = App(
        name="cardan",
        help="An LLM serving engine whose hardware is a plugin.",
        version=__version__,
        result_action="return_value",
    )
    for rank, (name, (target, text)) in enumerate(COMMANDS.items()):
        app.command(target, name=name, help=text, sort_key=rank)
    return app


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line; returns the exit code.

    0 is success, 2 a wrong setting, 130 an interrupt, 1 any other error that Cardan raises on purpose. Those are
    shown as one message; the traceback comes with ``--log-level debug``.
    """
    try:
        code = make_app()(list(argv) if argv is not None else sys.argv[1:])
        sys.stdout.flush()
    except CardanError as error:
        if logging.getLogger().isEnabledFor(logging.DEBUG):
            messages().print_exception()
        show_error(error)
        return EXIT_CONFIG if isinstance(error, ConfigError | UnsupportedError) else EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has gone; keep the interpreter from complaining about it while it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    return code if isinstance(code, int) else 0
