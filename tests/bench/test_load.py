"""Sending a workload: times, concurrency, failures; and a server over HTTP."""

from __future__ import annotations

import asyncio
import builtins
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from cardan.bench.http import BenchTargetError, HttpTarget
from cardan.bench.load import EngineTarget, run_load
from cardan.bench.measure import RequestRecord
from cardan.bench.workload import BenchRequest
from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.errors import ConfigError, QueueFullError


class CountingTarget:
    def __init__(self) -> None:
        self.open = 0
        self.most = 0

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        self.open += 1
        self.most = max(self.most, self.open)
        await asyncio.sleep(0.01)
        self.open -= 1
        record.add_chunk(record.sent_s + 0.01, 1)


def requests(count: int, gap_s: float = 0.0) -> list[BenchRequest]:
    return [BenchRequest((1, 2, 3), 4, index * gap_s) for index in range(count)]


async def test_concurrency_is_bounded() -> None:
    target = CountingTarget()
    done: list[RequestRecord] = []
    records = await run_load(target, requests(8), max_concurrency=3, on_done=done.append)
    assert target.most == 3
    assert len(records) == len(done) == 8
    target = CountingTarget()
    await run_load(target, requests(8))
    assert target.most == 8


async def test_requests_are_sent_at_their_times() -> None:
    start_s = time.monotonic()
    records = await run_load(CountingTarget(), requests(4, gap_s=0.05))
    assert all(record.sent_s - start_s >= 0.05 * index for index, record in enumerate(records))


class FakeEngine:
    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[GenerateOutput]:
        self.asked.append(request)
        assert request.input_ids is not None
        if request.input_ids == (9,):
            raise QueueFullError("too many")
        for index in range(request.sampling.max_new_tokens):
            yield GenerateOutput(rid="r", token_ids=(5,), prompt_tokens=3, cached_tokens=2, completion_tokens=index + 1)


async def test_an_engine_is_asked_for_the_exact_output_length() -> None:
    engine = FakeEngine()
    (record,) = await run_load(EngineTarget(engine), requests(1))  # type: ignore[arg-type]
    assert engine.asked[0].sampling.ignore_eos
    assert engine.asked[0].sampling.temperature == 0.0
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (3, 4, 2)
    assert record.chunk_tokens == [1, 1, 1, 1]


async def test_a_refused_request_is_recorded() -> None:
    (record,) = await run_load(EngineTarget(FakeEngine()), [BenchRequest((9,), 4, 0.0)])  # type: ignore[arg-type]
    assert record.error == "too many"
    assert not record.succeeded


Handler = Callable[[str, dict[str, Any]], tuple[int, list[bytes]]]


async def with_server(handler: Handler, use: Callable[[str], Awaitable[Any]]) -> Any:
    """A tiny HTTP/1.1 server that answers one request per connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.lower().split("\r\n") if line.startswith("content-length:")), 0)
        body = json.loads(await reader.readexactly(length)) if length else {}
        status, pieces = handler(head, body)
        writer.write(f"HTTP/1.1 {status} X\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n".encode())
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.005)
        writer.close()
        await writer.wait_closed()

    handlers: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.add(asyncio.ensure_future(serve(reader, writer)))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        return await use(f"http://127.0.0.1:{port}")
    finally:
        await asyncio.gather(*handlers, return_exceptions=True)
        server.close()
        await server.wait_closed()


def event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


STREAM = [
    event({"choices": [{"text": ""}]}),
    event({"choices": [{"text": "a"}]}),
    b": keep-alive\n\n",
    event({"choices": [{"text": "b"}], "usage": None}),
    event(
        {
            "choices": [],
            "usage": {"prompt_tokens": 3, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}},
        }
    ),
    b"data: [DONE]\n\n",
]


async def test_a_server_is_asked_and_measured() -> None:
    seen: list[dict[str, Any]] = []
    heads: list[str] = []

    def handle(head: str, body: dict[str, Any]) -> tuple[int, list[bytes]]:
        heads.append(head)
        if head.startswith("GET /v1/models"):
            return 200, [b'{"data": [{"id": "tiny"}]}']
        if head.startswith("GET /model_info"):
            return 200, [b'{"vocab_size": 260}']
        seen.append(body)
        return 200, STREAM

    async def use(url: str) -> RequestRecord:
        async with HttpTarget(url + "/v1/", api_key="secret") as target:
            assert target.model == "tiny"
            assert await target.vocab_size() == 260
            (record,) = await run_load(target, requests(1))
            return record

    record = await with_server(handle, use)
    assert record.error is None
    assert record.chunk_tokens == [1, 1]
    assert len(record.itl_s) == 1
    assert (record.prompt_tokens, record.completion_tokens, record.cached_tokens) == (3, 4, 1)
    assert seen[0]["prompt"] == [1, 2, 3]
    assert seen[0]["max_tokens"] == 4
    assert seen[0]["ignore_eos"] is True
    assert seen[0]["model"] == "tiny"
    assert "authorization: bearer secret" in heads[1].lower()


async def test_a_server_that_does_not_tell_its_vocabulary() -> None:
    async def use(url: str) -> int | None:
        async with HttpTarget(url, model="m") as target:
            return await target.vocab_size()

    assert await with_server(lambda head, body: (404, [b"{}"]), use) is None
    assert await with_server(lambda head, body: (200, [b"[]"]), use) is None


@pytest.mark.parametrize(
    ("status", "pieces", "message"),
    [
        (503, [b'{"error": "queue full"}'], 'HTTP 503: {"error": "queue full"}'),
        (200, [event({"error": {"message": "died"}})], "died"),
    ],
)
async def test_what_a_server_refuses_is_recorded(status: int, pieces: list[bytes], message: str) -> None:
    async def use(url: str) -> RequestRecord:
        async with HttpTarget(url, model="m") as target:
            (record,) = await run_load(target, requests(1))
            return record

    record = await with_server(lambda head, body: (status, pieces), use)
    assert record.error is not None
    assert message in record.error


async def test_no_server_at_all() -> None:
    target = HttpTarget("http://127.0.0.1:1")
    with pytest.raises(BenchTargetError, match=r"/v1/models gave no model: ConnectError.*correct --base-url"):
        await target.__aenter__()
    record = RequestRecord(sent_s=0.0)
    with pytest.raises(BenchTargetError, match="ConnectError"):
        await target.send(requests(1)[0], record)
    await target.__aexit__(None, None, None)


def test_without_httpx_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def fake_import(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "httpx":
            raise ImportError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake_import)
    with pytest.raises(ConfigError, match=r"pip install 'cardan\[bench\]'"):
        HttpTarget("http://127.0.0.1:1")
