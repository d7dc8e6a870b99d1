"""Runs a server: binds the port, starts the engine, serves, drains on a signal, and says how it ended.

It prints nothing; the caller learns of readiness by a callback and of the end by the exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from cardan.config import EngineConfig, ModelConfig, ServerConfig
from cardan.engine.api import AsyncEngine, EngineInfo
from cardan.errors import CardanError, ConfigError
from cardan.parsers import choose_parsers
from cardan.server.app import create_app
from cardan.server.chats.preparation import answer_format
from cardan.server.http.connections import guarded_protocol, raise_file_limit
from cardan.server.http.replies import ErrorReply
from cardan.server.state import ServerState
from cardan.server.watching.observers import Observers

logger = logging.getLogger("cardan.server")

EXIT_OK = 0
EXIT_ENGINE_DIED = 1
ABORT_GRACE_S = 2.0
"""How long aborted requests get to write their last words."""

WATCH_INTERVAL_S = 0.1


class ServedEngine(AsyncEngine, Protocol):
    """An engine that can be closed."""

    @property
    def failure(self) -> CardanError | None:
        """Why it is dead, or None."""

    async def close(self) -> None:
        """End all its processes."""


StartEngine = Callable[[EngineConfig], Awaitable[ServedEngine]]


@dataclass(frozen=True, slots=True)
class ServingInfo:
    """Where a ready server listens, and what it serves.

    Attributes:
        host: address it is bound to.
        port: the real port, also where the configuration says 0.
        engine: what is served.
        scheme: ``http`` or ``https``.
        answers: how calls of tools and reasoning are found in answers, in words.
    """

    host: str
    port: int
    engine: EngineInfo
    scheme: str = "http"
    answers: str = ""

    @property
    def url(self) -> str:
        """Base URL for clients on this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"{self.scheme}://[{host}]:{self.port}" if ":" in host else f"{self.scheme}://{host}:{self.port}"


def serve(
    config: EngineConfig,
    *,
    on_ready: Callable[[ServingInfo], None] | None = None,
    start_engine: StartEngine | None = None,
) -> int:
    """Serve until a signal or the death of the engine.

    SIGTERM or SIGINT stops taking requests, lets running ones finish for ``drain_timeout_s`` and ends with 0;
    a second signal stops at once. While the model loads every request gets a 503.

    Args:
        config: everything.
        on_ready: called once, when requests are taken.
        start_engine: starts the engine; by default the one of ``cardan.engine``.

    Returns:
        The exit code: 0 after a signal, 1 when the engine died.

    Raises:
        ConfigError: the port cannot be bound, the certificate not used, observers not opened, or there is no parser
            of a name; all of that is known before any weight is loaded.
        PluginError: a plugin does not load or fit.
        CardanError: the engine did not start.
    """
    check_parsers(config.model)
    check_tls(config.server)
    observers = Observers.open(config.server)
    raise_file_limit()
    sock = bind_socket(config.server)
    try:
        return asyncio.run(_Serving(config, sock, on_ready, start_engine or _start_frontend, observers).run())
    finally:
        sock.close()
        observers.close()


async def _start_frontend(config: EngineConfig) -> ServedEngine:
    from cardan.engine import Frontend

    return await Frontend.start(config)


def check_parsers(model: ModelConfig) -> None:
    """Check the names of parsers, once plugins have added theirs.

    Raises:
        ConfigError: there is no parser of a name, or the two cannot go together.
        PluginError: a plugin does not load or fit.
    """
    from cardan.engine.extensions import apply_installed_plugins

    apply_installed_plugins()
    choose_parsers(model.tool_call_parser, model.reasoning_parser, ())


def check_tls(server: ServerConfig) -> None:
    """Read the certificate and its key, so that a wrong one is known before the model loads.

    Raises:
        ConfigError: they cannot be read, do not belong together, or a password is missing or wrong.
    """
    if server.ssl_certfile is None:
        if server.ssl_keyfile or server.ssl_keyfile_password:
            raise ConfigError("--ssl-keyfile and --ssl-keyfile-password have no effect without --ssl-certfile. Add it.")
        return
    # Without a function OpenSSL would ask at the terminal.
    password = (server.ssl_keyfile_password or "").encode()
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(
            server.ssl_certfile, server.ssl_keyfile, lambda: password
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"The certificate cannot be used (--ssl-certfile {server.ssl_certfile}, --ssl-keyfile "
            f"{server.ssl_keyfile or 'the same file'}): {error}. Both must be PEM files that belong together; an "
            "encrypted key needs --ssl-keyfile-password."
        ) from error


def _tls_settings(server: ServerConfig) -> dict[str, Any]:
    if server.ssl_certfile is None:
        return {}
    return {
        "ssl_certfile": server.ssl_certfile,
        "ssl_keyfile": server.ssl_keyfile,
        "ssl_keyfile_password": server.ssl_keyfile_password or "",
    }


def bind_socket(server: ServerConfig) -> socket.socket:
    """A socket that listens on the configured address.

    Raises:
        ConfigError: the address is taken, not of this machine, or not allowed.
    """
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    # With the protocol named, asyncio sends small answers at once; else each waits 40 ms for the client to confirm.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((server.host, server.port))
        # Listening now makes a second server fail at once, before it loads weights too.
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ConfigError(
            f"Cannot listen on --host {server.host} --port {server.port}: {error.strerror or error}. "
            f"{_instead_of(error)}"
        ) from error
    sock.setblocking(False)
    return sock


def _instead_of(error: OSError) -> str:
    """What to do about an address that cannot be listened on."""
    if isinstance(error, socket.gaierror) or error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return "Pass a --host that is an address or a name of this machine (0.0.0.0 takes all of its IPv4 addresses)."
    if error.errno in (errno.EACCES, errno.EPERM):
        return "Pass a --port from 1024 on (0 takes a free one), or start the server as a user who may take this one."
    return "Stop what uses it, or pass another --port (0 takes a free one)."


class _UvicornServer(uvicorn.Server):
    """uvicorn without its own handling of signals."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the caller."""
        yield


class _Gate:
    """ASGI application that answers 503 until the real one is there."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            reply = ErrorReply(
                status=503,
                message="The model is still loading.",
                kind="server_error",
                code="loading",
                headers={"Retry-After": "5"},
            )
            await reply.response(scope["path"])(scope, receive, send)


class _Serving:
    """One run of ``serve``."""

    def __init__(
        self,
        config: EngineConfig,
        sock: socket.socket,
        on_ready: Callable[[ServingInfo], None] | None,
        start_engine: StartEngine,
        observers: Observers,
    ) -> None:
        self._config = config
        self._sock = sock
        self._on_ready = on_ready
        self._start_engine = start_engine
        self._observers = observers
        self._gate = _Gate()
        self._uvicorn = _UvicornServer(
            uvicorn.Config(
                self._gate,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                server_header=False,
                http=guarded_protocol(config.server.client_timeout_s),
                **_tls_settings(config.server),
                timeout_graceful_shutdown=int(ABORT_GRACE_S) + 1,
            )
        )
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._exit_code = EXIT_OK

    async def run(self) -> int:
        """Serve to the end; returns the exit code."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)
        http = asyncio.create_task(self._uvicorn.serve(sockets=[self._sock]))
        try:
            await self._serve_engine()
        finally:
            self._uvicorn.should_exit = True
            await http
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        return self._exit_code

    def _on_signal(self) -> None:
        if self._stop.is_set():
            logger.warning("A second signal: stopping at once")
            self._stop_now.set()
            self._uvicorn.force_exit = True
        self._stop.set()

    async def _serve_engine(self) -> None:
        starting = asyncio.ensure_future(self._start_engine(self._config))
        stopped = asyncio.create_task(self._stop.wait())
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            return
        engine = await starting
        try:
            await self._serve_until_stopped(engine)
        finally:
            self._uvicorn.should_exit = True
            await engine.close()

    async def _serve_until_stopped(self, engine: ServedEngine) -> None:
        app = create_app(engine, self._config, self._observers)
        state: ServerState = app.state.server
        self._gate.app = app
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
        host, port = self._sock.getsockname()[:2]
        logger.info("Serving %s on %s port %d", engine.info.model_name, host, port)
        answers = answer_format(state)
        logger.info("Answers: %s", answers)
        if self._on_ready is not None:
            scheme = "https" if self._config.server.ssl_certfile else "http"
            self._on_ready(ServingInfo(host, port, engine.info, scheme, str(answers)))
        while engine.alive and not self._stop.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), WATCH_INTERVAL_S)
        state.draining = True
        if engine.alive:
            await self._drain(state)
        if not engine.alive:
            logger.error("A process of the engine ended; the server stops")
            self._exit_code = EXIT_ENGINE_DIED
            if self._observers.crash is not None:
                self._observers.crash.write(self._config, engine)
            await state.wait_until_idle(ABORT_GRACE_S)

    async def _drain(self, state: ServerState) -> None:
        logger.info("Stopping: %d open requests may finish", state.num_open)
        idle = asyncio.create_task(finish_open_requests(state))
        now = asyncio.create_task(self._stop_now.wait())
        await asyncio.wait({idle, now}, return_when=asyncio.FIRST_COMPLETED)
        for task in (idle, now):
            task.cancel()
        await asyncio.gather(idle, now, return_exceptions=True)


async def finish_open_requests(state: ServerState) -> None:
    """Wait until open requests end, for the drain time at most; then abort those that are left."""
    clock, engine = asyncio.get_running_loop().time, state.engine
    deadline = clock() + state.config.server.drain_timeout_s
    while state.num_open and engine.alive and clock() < deadline:
        await state.wait_until_idle(WATCH_INTERVAL_S)
    if state.num_open and engine.alive:
        logger.warning("Stopping: %d requests are aborted after the drain time", state.num_open)
        await state.abort(None)
        await state.wait_until_idle(ABORT_GRACE_S)
