"""Remembers the requests of the last minutes, and writes them down when the engine dies.

The file is JSON; its requests are bodies of ``/generate`` or ``/v1/embeddings``, so that ``cardan replay`` or any HTTP
client can send them again. It holds prompts, which is why nothing is remembered unless a folder is named.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import logging
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from cardan.config import EngineConfig
from cardan.engine.api import EngineInfo, GenerateOutput, GenerateRequest
from cardan.errors import CardanError, ConfigError
from cardan.server.settings_report import shown_settings
from cardan.text.tokenizer import Tokenizer
from cardan.types import LogprobParams, SamplingParams

FORMAT = 1
MOST_AGE_S = 300.0
MOST_REQUESTS = 1000
"""Finished requests that are remembered; those that run are too, however many they are."""

logger = logging.getLogger("cardan.server")


class DumpedEngine(Protocol):
    """What a dump tells of an engine."""

    @property
    def failure(self) -> CardanError | None:
        """Why it is dead."""

    @property
    def info(self) -> EngineInfo:
        """What it served."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""


@dataclasses.dataclass(slots=True)
class RememberedRequest:
    """One prompt, and how far it came.

    Attributes:
        request: as the engine got it.
        started_s: Unix time.
        ended_s: Unix time, or None while it runs.
        completion_tokens: by choice.
        finish_reasons: by choice.
    """

    request: GenerateRequest
    started_s: float
    ended_s: float | None = None
    completion_tokens: dict[int, int] = dataclasses.field(default_factory=dict)
    finish_reasons: dict[int, str] = dataclasses.field(default_factory=dict)

    def report(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """As the dump has it."""
        path, body = sendable(self.request, tokenizer)
        return {
            "started": _timestamp(self.started_s),
            "ended": None if self.ended_s is None else _timestamp(self.ended_s),
            "completion_tokens": list(self.completion_tokens.values()),
            "finish_reasons": list(self.finish_reasons.values()),
            "path": path,
            "body": body,
        }


class CrashMemory:
    """The requests that a dump would hold."""

    def __init__(self, folder: Path) -> None:
        """Write into ``folder``, which is made.

        Raises:
            ConfigError: it cannot be made, or written to.
        """
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / ".cardan-probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(
                f"--crash-dump-folder {folder} cannot be written: {error.strerror}. Name a folder that can."
            ) from error
        self._folder = folder
        self._running: dict[int, RememberedRequest] = {}
        self._finished: deque[RememberedRequest] = deque(maxlen=MOST_REQUESTS)

    def watch(self, requests: Sequence[GenerateRequest]) -> _CrashWatcher:
        """Remember the prompts of one HTTP request."""
        now_s = time.time()
        remembered = [RememberedRequest(request, now_s) for request in requests]
        self._running.update((id(item), item) for item in remembered)
        return _CrashWatcher(self, remembered)

    def forget(self, remembered: Sequence[RememberedRequest]) -> None:
        """These run no more: they are kept for a while."""
        now_s = time.time()
        for item in remembered:
            item.ended_s = now_s
            if self._running.pop(id(item), None) is not None:
                self._finished.append(item)
        while self._finished and (self._finished[0].ended_s or now_s) < now_s - MOST_AGE_S:
            self._finished.popleft()

    def write(self, config: EngineConfig, engine: DumpedEngine) -> Path | None:
        """Write the dump. Returns where, or None when it could not be written, which the log then says."""
        info, tokenizer = engine.info, engine.tokenizer
        now = datetime.datetime.now(datetime.UTC)
        dump = {
            "format": FORMAT,
            "time": now.isoformat(timespec="milliseconds"),
            "reason": str(engine.failure),
            "version": info.version,
            "model": info.model_name,
            "plan": info.plan,
            "config": shown_settings(config),
            "running": [item.report(tokenizer) for item in self._running.values()],
            "finished": [item.report(tokenizer) for item in self._finished],
        }
        path = self._folder / f"cardan-crash-{now:%Y%m%dT%H%M%S%f}.json"
        try:
            path.write_bytes(msgspec.json.format(msgspec.json.encode(dump), indent=1))
        except OSError as error:
            logger.error("The crash dump could not be written to %s: %s", path, error.strerror)
            return None
        logger.error("The requests of the last minutes are in %s; `cardan replay` sends them again", path)
        return path


class _CrashWatcher:
    """Follows the prompts of one HTTP request."""

    def __init__(self, memory: CrashMemory, remembered: list[RememberedRequest]) -> None:
        self._memory = memory
        self._remembered = remembered

    def see(self, prompt_index: int, output: GenerateOutput) -> None:
        """Note how far a choice is."""
        item = self._remembered[prompt_index]
        item.completion_tokens[output.index] = output.completion_tokens
        if output.finish_reason is not None:
            item.finish_reasons[output.index] = output.finish_reason.kind.value

    def close(self) -> None:
        """The request ended."""
        self._memory.forget(self._remembered)


def sendable(request: GenerateRequest, tokenizer: Tokenizer) -> tuple[str, dict[str, Any]]:
    """The route and the body that ask for the same again; what is left at its default is left out."""
    prompt: str | list[int] | list[list[float]]
    name = "text" if request.add_special_tokens and request.text is not None else "input_ids"
    if request.input_embeds is not None:
        name, prompt = "input_embeds", request.input_embeds.tolist()
    elif request.text is None:
        prompt = list(request.input_ids or ())
    elif request.add_special_tokens:
        prompt = request.text
    else:  # a chat's template has put them in already, and the routes would add them again
        prompt = tokenizer.encode(request.text, add_special_tokens=False)
    if request.pooling is not None:
        return "/v1/embeddings", {"input": prompt}
    body: dict[str, Any] = {"rid": request.rid} if request.rid else {}
    body[name] = prompt
    if request.processor is not None:
        body["custom_logit_processor"] = {"name": request.processor[0], "params": json.loads(request.processor[1])}
    if request.hidden_states:
        body["return_hidden_states"] = True
    defaults = SamplingParams()
    sampling = {item.name: getattr(request.sampling, item.name) for item in dataclasses.fields(SamplingParams)}
    # The receiving server may have other defaults, so those that a model sets are always told.
    body["sampling_params"] = {
        name: value for name, value in sampling.items() if name in _TOLD or value != getattr(defaults, name)
    }
    if request.logprobs != LogprobParams():
        body |= _logprob_fields(request.logprobs)
    for field in ("priority", "cache_salt", "routing_key"):
        if value := getattr(request, field):
            body[field] = value
    return "/generate", body


_TOLD = frozenset({"max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty"})


def _logprob_fields(logprobs: LogprobParams) -> dict[str, Any]:
    fields: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": logprobs.top}
    if logprobs.prompt_start is not None:
        fields["logprob_start_len"] = logprobs.prompt_start
    if logprobs.token_ids:
        fields["token_ids_logprob"] = list(logprobs.token_ids)
    return fields


def _timestamp(time_s: float) -> str:
    return datetime.datetime.fromtimestamp(time_s, datetime.UTC).isoformat(timespec="milliseconds")
