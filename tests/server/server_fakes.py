"""A deterministic engine in this process, and a server thread that any engine can stand behind."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import numpy as np
import re2
import uvicorn

from cardan.config import EngineConfig, SchedulerConfig, ServerConfig
from cardan.engine.api import EngineInfo, EngineStats, GenerateOutput, GenerateRequest, RequestTimes
from cardan.engine.validation import RequestLimits, check_prompt, check_request
from cardan.errors import EngineDeadError, PromptTooLongError, QueueFullError, RequestError
from cardan.server import create_app
from cardan.server.http.connections import guarded_protocol
from cardan.server.serve import bind_socket
from cardan.types import FinishKind, FinishReason, TokenLogprobs

if TYPE_CHECKING:
    import openai

EOS_ID, IM_START_ID, IM_END_ID, VOCAB_SIZE = 256, 257, 258, 260
SPECIAL = {EOS_ID: "<|endoftext|>", IM_START_ID: "<|im_start|>", IM_END_ID: "<|im_end|>"}


TEMPLATE = """\
{% if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""The chat template of real engines: one that tells of tools and calls, so that models can be made to call."""


class FakeTokenizer:
    """One token a byte, and three special ones."""

    vocab_size = VOCAB_SIZE
    bos_id = None
    eos_ids = frozenset({EOS_ID, IM_END_ID})
    has_chat_template = True
    special_ids = frozenset(SPECIAL)
    special_tokens: Mapping[str, str] = {"eos_token": SPECIAL[EOS_ID]}
    chat_templates: Mapping[str, str] = {}
    variables: frozenset[str] = frozenset()
    rendered: Mapping[str, Any] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data = text.encode()
        for token, name in SPECIAL.items():
            data = data.replace(name.encode(), b"\xff" + bytes([token - 256]))
        pieces = iter(data)
        return [256 + next(pieces) if byte == 0xFF else byte for byte in pieces]

    def decode(self, ids: Any, skip_special_tokens: bool = True) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in SPECIAL)]
        return b"".join(self.token_bytes(i) for i in kept).decode(errors="replace")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else SPECIAL.get(token, "").encode()

    def token_text(self, token: int) -> str:
        return self.token_bytes(token).decode(errors="replace")

    def token_id(self, text: str) -> int | None:
        return next((token for token, name in SPECIAL.items() if name == text), None)

    def template_reads(self, variable: str) -> bool:
        return variable in self.variables

    def render_chat(
        self, messages: Any, /, *, tools: Any = None, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        self.rendered = {"messages": messages, **({"tools": tools} if tools else {}), **kwargs}
        if not self.has_chat_template:
            raise RequestError("This model has no chat template. Use completions.", code="no_chat_template")
        if kwargs.get("continue_final_message"):
            *messages, last = messages
            return self.render_chat(messages) + last["content"]
        text = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        text = kwargs.get("prefix", "") + text
        return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")


class FakeEngine:
    """Letters that follow from the prompt, the seed and the choice; knobs make it slow, full, dead or wrong.

    Words in the prompt ask for special endings: ``[eos]`` an end of sequence after 3 letters, ``[nan]`` an error
    after 2, ``[accent]`` characters of several tokens, ``[die]`` the death of the engine after 3 letters. What
    ``say`` makes of a text asks for that text and an end of sequence.
    """

    def __init__(self, *, delay_s: float = 0.0, context_length: int = 4096) -> None:
        self.tokenizer = FakeTokenizer()
        self.alive = True
        self.failure = EngineDeadError("The scheduler process ended with exit code 9.")
        self.delay_s = delay_s
        self.hang = False
        self.full = False
        self.clamp: int | None = None
        self.cut_from: int | None = None
        self.closed = False
        self.seen: list[GenerateRequest] = []
        self.open: dict[str, asyncio.Event] = {}
        self.totals: Counter[str] = Counter()
        self._prompts: list[tuple[int, ...]] = []
        self.info = EngineInfo(
            model_name="tiny",
            model_path="/models/tiny",
            vocab_size=VOCAB_SIZE,
            context_length=context_length,
            max_input_tokens=context_length - 6,
            max_total_tokens=4 * context_length,
            plan={"platform": "fake"},
            version="0",
            hidden_size=3,
            grammar_backend="llguidance",
        )

    async def close(self) -> None:
        self.closed = True
        self.alive = False

    async def abort(self, rid: str | None) -> None:
        for name, event in self.open.items():
            if rid in (None, name):
                event.set()

    async def flush_cache(self) -> bool:
        if self.open:
            return False
        self._prompts.clear()
        return True

    async def start_profile(self, num_steps: int | None = None) -> None:
        raise RequestError("Profiles are off. Start the server with --profile-folder DIR.", code="feature_not_enabled")

    async def stop_profile(self) -> str:
        raise RequestError("No profile is being recorded. Send /start_profile first.", code="not_started")

    async def stats(self) -> EngineStats:
        cached = sum(len(prompt) for prompt in self._prompts)
        return EngineStats(
            num_running=len(self.open),
            num_queued=7 if self.full else 0,
            used_tokens=10 * len(self.open),
            cached_tokens=cached,
            max_total_tokens=self.info.max_total_tokens,
            totals=dict(self.totals),
            gen_throughput=float(self.totals["generated_tokens"]),
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        started_s = time.monotonic()
        self._check_alive()
        prompt = self._admit(request)
        rid = request.rid or "none"
        aborted = self.open[rid] = asyncio.Event()
        self.totals["requests"] += 1
        self.totals["prompt_tokens"] += len(prompt)
        cached = max((_common(prompt, old) for old in self._prompts), default=0)
        self.totals["cached_prompt_tokens"] += cached
        self._prompts.append(prompt)
        try:
            choices = [_plan_choice(self.tokenizer, request, prompt, index) for index in range(request.sampling.n)]
            total = max(len(choice) for choice in choices)
            for step in range(total):
                if step == 3 and "[die]" in self.tokenizer.decode(prompt):
                    self.alive = False
                await self._pause(aborted)
                for choice in choices:
                    if step >= len(choice):
                        continue
                    output = choice[step]
                    if aborted.is_set():
                        output = msgspec.structs.replace(
                            output,
                            text="",
                            token_ids=(),
                            logprobs=(),
                            finish_reason=FinishReason(FinishKind.ABORT, message="Aborted."),
                        )
                    self.totals["generated_tokens"] += len(output.token_ids)
                    now_s = time.monotonic() - started_s
                    yield msgspec.structs.replace(
                        output,
                        rid=rid,
                        cached_tokens=cached,
                        max_new_tokens_clamped=self.clamp,
                        truncated_from=self.cut_from,
                        times=RequestTimes(queue_s=now_s / 2, first_token_s=now_s, e2e_s=now_s),
                    )
                if aborted.is_set():
                    self.totals["aborted_requests"] += 1
                    return
        finally:
            del self.open[rid]

    def _admit(self, request: GenerateRequest) -> tuple[int, ...]:
        limits = RequestLimits(
            vocab_size=VOCAB_SIZE,
            platform="fake",
            grammar_backend=self.info.grammar_backend,
            hidden_size=self.info.hidden_size,
            gives_hidden_states=True,
        )
        check_request(request, limits)
        prompt = request.input_ids
        if request.input_embeds is not None:
            prompt = tuple(97 + zlib.crc32(vector.tobytes()) % 26 for vector in request.input_embeds)
        if prompt is None:
            prompt = tuple(self.tokenizer.encode(request.text or ""))
        check_prompt(request, prompt, limits)
        if len(prompt) > self.info.max_input_tokens:
            raise PromptTooLongError(
                f"The prompt has {len(prompt)} tokens, more than the {self.info.max_input_tokens} that fit."
            )
        if request.rid in self.open:
            raise RequestError(f"rid {request.rid!r} is in use.", param="rid")
        if self.full:
            raise QueueFullError("Too many requests wait (7).", retry_after_s=2.5)
        self.seen.append(request)
        return prompt

    async def _pause(self, aborted: asyncio.Event) -> None:
        await asyncio.sleep(self.delay_s)
        while self.hang and not aborted.is_set():
            self._check_alive()
            await asyncio.sleep(0.005)
        self._check_alive()

    def _check_alive(self) -> None:
        if not self.alive:
            raise EngineDeadError("The scheduler process ended with exit code 9.")


def _common(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    count = 0
    for a, b in zip(left[:-1], right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _letters(tokenizer: FakeTokenizer, request: GenerateRequest, prompt: tuple[int, ...], index: int) -> list[int]:
    text = tokenizer.decode(prompt)
    params = request.sampling
    said = re2.search(r"\[say ([0-9a-f]*)\]", text)
    if said:
        return [*tokenizer.encode(bytes.fromhex(said[1]).decode()), EOS_ID][: params.max_new_tokens]
    if "[accent]" in text:
        return [*"aé€".encode(), *b"xyz"][: params.max_new_tokens]
    noise = (params.seed, index) if params.temperature else ()
    letters = [
        97 + zlib.crc32(repr((prompt, noise, step)).encode()) % 26 for step in range(min(params.max_new_tokens, 4096))
    ]
    if "[eos]" in text and not params.ignore_eos:
        letters[3:] = [EOS_ID]
    return letters


def _plan_choice(
    tokenizer: FakeTokenizer, request: GenerateRequest, prompt: tuple[int, ...], index: int
) -> list[GenerateOutput]:
    params = request.sampling
    tokens = _letters(tokenizer, request, prompt, index)
    reason = FinishReason(FinishKind.LENGTH, length=len(tokens))
    if tokens[-1] == EOS_ID:
        reason = FinishReason(FinishKind.STOP, matched=EOS_ID)
    text = tokenizer.decode(tokens, skip_special_tokens=params.skip_special_tokens)
    for stop in (*params.stop, *params.stop_regex):
        match = re2.search(stop if stop in params.stop_regex else re2.escape(stop), text)
        if match:
            end = match.end() if params.no_stop_trim else match.start()
            tokens = tokens[: match.end()]
            text, reason = text[:end], FinishReason(FinishKind.STOP, matched=stop)
            break
    if "[nan]" in tokenizer.decode(prompt):
        tokens, reason = tokens[:2], FinishReason(FinishKind.ERROR, message="The logits hold NaN.")
    pieces = _pieces(tokenizer, tokens, text)
    with_states = request.hidden_states
    outputs = [
        GenerateOutput(
            rid="",
            index=index,
            text=piece,
            token_ids=(token,),
            logprobs=(_logprobs(request, token),) if request.logprobs.output else (),
            prompt_tokens=len(prompt),
            completion_tokens=step + 1,
            hidden_states=_states([tokens[step - 1]]) if with_states and step else (),
        )
        for step, (token, piece) in enumerate(zip(tokens, pieces, strict=True))
    ]
    outputs[-1] = msgspec.structs.replace(outputs[-1], finish_reason=reason)
    if with_states:
        outputs[0] = msgspec.structs.replace(outputs[0], hidden_states=_states(prompt))
    start = request.logprobs.prompt_start
    if start is not None:
        known = [None if at == 0 else _logprobs(request, token) for at, token in enumerate(prompt)]
        outputs[0] = msgspec.structs.replace(
            outputs[0], prompt_logprobs=tuple(known[start:]), prompt_token_ids=prompt[start:]
        )
    return outputs


def _states(tokens: Sequence[int]) -> tuple[bytes, ...]:
    return tuple(np.array([token, 0, 1], np.float32).tobytes() for token in tokens)


def say(text: str) -> str:
    """Words for a prompt that make a fake engine answer with a certain text."""
    return f"[say {text.encode().hex()}]"


def _pieces(tokenizer: FakeTokenizer, tokens: list[int], text: str) -> list[str]:
    """The text, cut where each token completes its characters; text behind a stop never shows."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    pieces, at = [], 0
    for token in tokens:
        end = min(at + len(decoder.decode(tokenizer.token_bytes(token))), len(text))
        pieces.append(text[at:end])
        at = end
    return pieces


def _logprobs(request: GenerateRequest, token: int) -> TokenLogprobs:
    top = tuple((97 + i, -0.5 * (i + 1)) for i in range(request.logprobs.top))
    chosen = tuple((i, -float(i)) for i in request.logprobs.token_ids)
    return TokenLogprobs(logprob=-(token % 7) / 4, top=top, chosen=chosen)


class ServerThread:
    """A server on loopback with an event loop of its own, so that tests may use blocking clients."""

    def __init__(self, make_engine: Callable[[], Awaitable[Any]], config: EngineConfig) -> None:
        self._make_engine = make_engine
        self.config = config
        self.engine: Any = None
        self.app: Any = None
        self.loop = asyncio.new_event_loop()
        self._sock = bind_socket(config.server)
        self.url = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self.headers = {"Authorization": f"Bearer {config.server.api_key}".encode()} if config.server.api_key else {}
        self.http = self.client()
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._uvicorn: uvicorn.Server | None = None
        self._thread = threading.Thread(target=self._main, daemon=True)

    def start(self) -> ServerThread:
        self._thread.start()
        self._started.wait(60)
        if self._failure is not None:
            raise self._failure
        return self

    def stop(self) -> None:
        if self._uvicorn is not None:
            self._uvicorn.should_exit = True
        self._thread.join(20)
        self.http.close()
        self._sock.close()

    def call(self, work: Any) -> Any:
        """Run a coroutine on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(30)

    def _main(self) -> None:
        try:
            self.loop.run_until_complete(self._run())
        except BaseException as error:  # noqa: BLE001 - raised again by start()
            self._failure = error
        finally:
            self._started.set()
            self.loop.close()

    async def _run(self) -> None:
        self.engine = await self._make_engine()
        self.app = create_app(self.engine, self.config)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.app,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
                timeout_graceful_shutdown=1,
                http=guarded_protocol(self.config.server.client_timeout_s),
            )
        )
        with contextlib.suppress(AttributeError):
            self._uvicorn.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
        serving = asyncio.create_task(self._uvicorn.serve(sockets=[self._sock]))
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
        self._started.set()
        await serving
        await self.engine.close()

    def client(self, **kwargs: Any) -> httpx.Client:
        # Without verification no certificates are loaded, which would take a quarter of a second.
        return httpx.Client(base_url=self.url, headers=self.headers, timeout=30, verify=False, **kwargs)

    def openai(self, **kwargs: Any) -> openai.OpenAI:
        """OpenAI's own client, without retries."""
        import openai

        return openai.OpenAI(
            base_url=f"{self.url}/v1",
            api_key=self.config.server.api_key or "none",
            max_retries=0,
            http_client=openai.DefaultHttpxClient(verify=False),
            **kwargs,
        )

    def stats(self) -> dict[str, Any]:
        """Engine stats and open requests, over HTTP."""
        info = self.http.get("/server_info").json()
        return {**info["stats"], "open_requests": info["open_requests"]}

    def wait_idle(self, timeout_s: float = 10) -> None:
        """Wait until nothing is left in server and engine, and fail when something stays."""
        deadline = time.monotonic() + timeout_s
        stats: dict[str, Any] = {}
        while time.monotonic() < deadline:
            stats = self.stats()
            if not (stats["open_requests"] or stats["num_running"] or stats["num_queued"]):
                return
            time.sleep(0.02)
        raise AssertionError(f"requests remain: {stats}")


def server_config(*, scheduler: SchedulerConfig | None = None, **server: Any) -> EngineConfig:
    """A configuration for tests: a free port unless one is given."""
    return EngineConfig(server=ServerConfig(**{"port": 0, **server}), scheduler=scheduler or SchedulerConfig())
