"""The offline API: an engine in a script, without HTTP.

It runs the same processes as the server; a frontend on an event loop in a background thread talks to them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import dataclasses
import itertools
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar, Unpack

from cardan.config import EngineConfig
from cardan.engine.api import GenerateOutput
from cardan.engine.frontend import Frontend, ProgressListener
from cardan.engine.merging import merge
from cardan.engine.native import NativeOutput
from cardan.engine.native_request import NativeCall, NativeOptions, native_call
from cardan.engine.options import config_from_options
from cardan.errors import ConfigError, EngineDeadError
from cardan.text.tokenizer import Tokenizer
from cardan.types import SamplingParams

T = TypeVar("T")
Sampling = Mapping[str, Any] | SamplingParams | Sequence[Mapping[str, Any] | SamplingParams] | None
"""Sampling parameters for all prompts, or a list with one entry per prompt."""


class Engine:
    """Generates text offline.

    ::

        with Engine(model="smollm2-135m") as engine:
            print(engine.generate("The capital of France is", {"max_new_tokens": 8})["text"])
    """

    def __init__(
        self, *, config: EngineConfig | None = None, on_progress: ProgressListener | None = None, **options: Any
    ) -> None:
        """Start the processes and wait until they serve.

        Args:
            config: everything at once.
            on_progress: told how far the parts of the start are, from a background thread.
            options: instead of ``config``, any of its fields by name: ``model``, ``platform``, ``max_total_tokens`` …

        Raises:
            ConfigError: an option is unknown or wrong, or both kinds were given.
            CardanError: what made the start fail.
        """
        if config is not None and options:
            raise ConfigError(f"Pass either config or single options, got config and {', '.join(options)}.")
        if config is None:
            config = config_from_options({"log_level": "warning", **options})
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cardan-engine", daemon=True)
        self._thread.start()
        self._closed = False
        self._gate = threading.Lock()
        self._ending = threading.Lock()
        try:
            self._frontend = self._run(Frontend.start(config, on_progress))
        except BaseException:
            self._stop_loop()
            raise
        atexit.register(self.shutdown)

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        future = self._submit(work)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Hand work to the loop, unless no one will be there to end it."""
        with self._gate:
            if self._closed:
                work.close()
                raise EngineDeadError("The engine was shut down.")
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _stop_loop(self) -> None:
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._frontend.tokenizer

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling = None,
        *,
        stream: bool = False,
        **options: Unpack[NativeOptions],
    ) -> Any:
        """Continue one prompt or many.

        Args:
            prompt: a text or a list of texts; or pass ``input_ids=``.
            sampling_params: fields of ``SamplingParams``, for all prompts or one entry per prompt. Where a dict does
                not state a field, the model's default applies (``sampling_defaults``).
            stream: give an iterator of the answers so far instead; each has an ``index`` when there are several.
            options: see ``NativeOptions``.

        Returns:
            A dict with ``text``, ``output_ids`` and ``meta_info``; a list of them for a list of prompts or ``n > 1``.

        Raises:
            RequestError: the request is wrong.
            QueueFullError: too many requests wait.
            EngineDeadError: a process of the engine ended.
        """
        call = native_call(prompt, sampling_params, options, self._frontend.info.sampling_defaults)
        if stream:
            return self._iterate(call)
        return self._run(self._collect(call))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Sampling = None,
        *,
        stream: bool = False,
        **options: Unpack[NativeOptions],
    ) -> Any:
        """``generate`` for a caller with an event loop of its own; with ``stream`` it gives an async iterator."""
        call = native_call(prompt, sampling_params, options, self._frontend.info.sampling_defaults)
        if stream:
            return self._iterate_async(call)
        return await asyncio.wrap_future(self._submit(self._collect(call)))

    def abort(self, rid: str | None = None) -> None:
        """Abort one request, or all for None."""
        self._run(self._frontend.abort(rid))

    def flush_cache(self) -> bool:
        """Empty the prefix cache. Returns False when requests were running, and then nothing was done.

        Raises:
            EngineBusyError: no answer came in time; the cache may still be emptied later.
            EngineDeadError: a process of the engine ended.
        """
        return self._run(self._frontend.flush_cache())

    def get_server_info(self) -> dict[str, Any]:
        """What is served, how it was resolved, and gauges as of now.

        Raises:
            EngineBusyError: no answer came in time.
            EngineDeadError: a process of the engine ended.
        """
        stats = self._run(self._frontend.stats())
        return {**dataclasses.asdict(self._frontend.info), "stats": dataclasses.asdict(stats)}

    def shutdown(self) -> None:
        """End the processes; calls in other threads get an ``EngineDeadError``. Calling it again does nothing."""
        with self._ending:
            if self._closed:
                return
            atexit.unregister(self.shutdown)
            with self._gate:
                self._closed = True
            asyncio.run_coroutine_threadsafe(self._end_everything(), self._loop).result()
            self._stop_loop()

    async def _end_everything(self) -> None:
        """Close the frontend and let those who wait hear of it, before the loop they wait on stops."""
        await self._frontend.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            _, late = await asyncio.wait(others, timeout=1.0)
            for task in late:
                task.cancel()

    # --- on the background loop -----------------------------------------------------------------

    def _outputs(self, call: NativeCall) -> AsyncGenerator[tuple[int, GenerateOutput], None]:
        """News of all prompts as they come, each with the index of its prompt."""
        return merge([self._frontend.generate(request) for request in call.requests])

    def _answers(self, call: NativeCall) -> list[list[NativeOutput]]:
        """Empty answers, by prompt and choice."""
        token_text = self.tokenizer.token_text if call.text_in_logprobs else None
        return [
            [NativeOutput(request.logprobs, token_text) for _ in range(request.sampling.n)] for request in call.requests
        ]

    async def _collect(self, call: NativeCall) -> Any:
        answers = self._answers(call)
        async with contextlib.aclosing(self._outputs(call)) as outputs:
            async for index, output in outputs:
                answers[index][output.index].add(output)
        whole = [answer.as_dict() for of_prompt in answers for answer in of_prompt]
        return whole if call.many else whole[0]

    async def _stream(self, call: NativeCall) -> AsyncGenerator[dict[str, Any], None]:
        """Answers so far of all prompts and choices, as they come; the index counts choices over all prompts."""
        answers = self._answers(call)
        first_index = list(itertools.accumulate((len(of_prompt) for of_prompt in answers), initial=0))
        async with contextlib.aclosing(self._outputs(call)) as outputs:
            async for index, output in outputs:
                answer = answers[index][output.index]
                answer.add(output)
                place = {"index": first_index[index] + output.index} if call.many else {}
                yield {**place, **answer.as_dict()}

    def _iterate(self, call: NativeCall) -> Iterator[dict[str, Any]]:
        answers = self._stream(call)
        try:
            while (answer := self._run(_next(answers))) is not None:
                yield answer
        finally:
            if not self._closed:
                self._run(_close(answers))

    async def _iterate_async(self, call: NativeCall) -> AsyncIterator[dict[str, Any]]:
        answers = self._stream(call)

        async def on_loop(work: Coroutine[Any, Any, T]) -> T:
            return await asyncio.wrap_future(self._submit(work))

        try:
            while (answer := await on_loop(_next(answers))) is not None:
                yield answer
        finally:
            if not self._closed:
                await on_loop(_close(answers))


async def _next(answers: AsyncIterator[dict[str, Any]]) -> dict[str, Any] | None:
    return await anext(answers, None)


async def _close(answers: AsyncGenerator[dict[str, Any], None]) -> None:
    await answers.aclose()
