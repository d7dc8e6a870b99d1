"""A server as the target of a load: the OpenAI completions endpoint, streamed, with prompts as token ids.

It needs httpx, which the ``bench`` extra brings, and knows nothing of the server behind the URL.
"""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec

from cardan.bench.measure import RequestRecord
from cardan.bench.workload import BenchRequest
from cardan.errors import CardanError, ConfigError

if TYPE_CHECKING:
    import httpx

TIMEOUT_S = 600.0
"""How long one request may stay silent."""


class BenchTargetError(CardanError):
    """The server under load refused a request or broke it off."""


class HttpTarget:
    """A server that speaks OpenAI's completions."""

    def __init__(self, base_url: str, model: str | None = None, api_key: str | None = None) -> None:
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._client = _require_httpx().AsyncClient(
            base_url=self._base_url, headers=headers, timeout=TIMEOUT_S, trust_env=False
        )

    async def __aenter__(self) -> HttpTarget:
        if self._model is None:
            self._model = await self._first_model()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._client.aclose()

    @property
    def model(self) -> str | None:
        """The model that requests name."""
        return self._model

    async def _first_model(self) -> str:
        httpx = _require_httpx()
        try:
            reply = await self._client.get("/v1/models")
            reply.raise_for_status()
            return str(reply.json()["data"][0]["id"])
        except (httpx.HTTPError, LookupError, ValueError) as error:
            raise BenchTargetError(
                f"{self._base_url}/v1/models gave no model: {type(error).__name__}: {error}. "
                "Start the server, or correct --base-url."
            ) from error

    async def vocab_size(self) -> int | None:
        """Ids of the model, where the server tells it at ``/model_info``; others do not."""
        httpx = _require_httpx()
        try:
            reply = await self._client.get("/model_info")
            return int(reply.json()["vocab_size"]) if reply.status_code == 200 else None
        except (httpx.HTTPError, LookupError, TypeError, ValueError):
            return None

    async def send(self, request: BenchRequest, record: RequestRecord) -> None:
        """Run one request; see ``cardan.bench.load.Target``."""
        httpx = _require_httpx()
        body = {
            "model": self._model,
            "prompt": list(request.input_ids),
            "max_tokens": request.output_len,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        try:
            async with self._client.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != 200:
                    text = (await reply.aread()).decode(errors="replace")
                    raise BenchTargetError(f"HTTP {reply.status_code}: {text[:300]}")
                await _read_events(reply, record)
        except httpx.HTTPError as error:
            raise BenchTargetError(f"{type(error).__name__}: {error}") from error


async def _read_events(reply: httpx.Response, record: RequestRecord) -> None:
    pieces = 0
    async for line in reply.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        event: dict[str, Any] = msgspec.json.decode(data)
        if "error" in event:
            raise BenchTargetError(str(event["error"]))
        if any(choice.get("text") for choice in event.get("choices", ())):
            pieces += 1
            record.chunk_times_s.append(time.monotonic())
        _read_usage(event.get("usage"), record)
    # The protocol does not say how many tokens a piece holds; totals come from the usage.
    record.chunk_tokens = [1] * pieces


def _read_usage(usage: dict[str, Any] | None, record: RequestRecord) -> None:
    if usage:
        record.prompt_tokens = int(usage.get("prompt_tokens", 0))
        record.completion_tokens = int(usage.get("completion_tokens", 0))
        record.cached_tokens = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def _require_httpx() -> Any:
    try:
        import httpx
    except ImportError:
        raise ConfigError("Load over HTTP needs httpx. Run: pip install 'cardan[bench]'") from None
    return httpx
