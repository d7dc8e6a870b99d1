"""The requests that a frontend has open, and the way from a choice's wire id to the consumer that waits for it.

It knows no socket; memory of a request ends with its entry here. News that a slow consumer has not taken are
gathered into one output for each choice.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import dataclass, field, replace

import msgspec

from cardan.engine.api import GenerateOutput, GenerateRequest, RequestTimes
from cardan.engine.messages import Details, Generate, TextNews
from cardan.errors import CardanError, RequestError


@dataclass(slots=True)
class _Choice:
    """Totals of one choice so far."""

    index: int
    num_tokens: int = 0
    first_token_s: float | None = None
    details: Details | None = None


class _Gathered:
    """Several news of one choice that its consumer has not taken, as one output."""

    __slots__ = ("_first", "_hidden_states", "_latest", "_logprobs", "_texts", "_token_ids")

    def __init__(self, first: GenerateOutput) -> None:
        self._first = self._latest = first
        self._texts = [first.text]
        self._token_ids = [*first.token_ids]
        self._logprobs = [*first.logprobs]
        self._hidden_states = [*first.hidden_states]

    def add(self, output: GenerateOutput) -> None:
        """Append later news."""
        self._latest = output
        self._texts.append(output.text)
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._hidden_states.extend(output.hidden_states)

    def output(self) -> GenerateOutput:
        """All of it: what was added in order, the latest totals."""
        first, latest = self._first, self._latest
        return msgspec.structs.replace(
            latest,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            logprobs=tuple(self._logprobs),
            hidden_states=tuple(self._hidden_states),
            prompt_logprobs=first.prompt_logprobs or latest.prompt_logprobs,
            prompt_token_ids=first.prompt_token_ids or latest.prompt_token_ids,
        )


class Pending:
    """News that a consumer has not taken: one output for each choice at most, and the error that ends them."""

    __slots__ = ("_arrived", "_by_choice", "_error")

    def __init__(self) -> None:
        self._by_choice: dict[int, GenerateOutput | _Gathered] = {}
        self._error: CardanError | None = None
        self._arrived = asyncio.Event()

    def __bool__(self) -> bool:
        return bool(self._by_choice)

    def put(self, output: GenerateOutput) -> None:
        """Add news of a choice."""
        waiting = self._by_choice.get(output.index)
        if waiting is None:
            self._by_choice[output.index] = output
        else:
            if not isinstance(waiting, _Gathered):
                waiting = self._by_choice[output.index] = _Gathered(waiting)
            waiting.add(output)
        self._arrived.set()

    def fail(self, error: CardanError) -> None:
        """End the news with an error; a second one is dropped."""
        self._error = self._error or error
        self._arrived.set()

    async def take(self) -> GenerateOutput:
        """Wait for news and take those of the choice that waits longest.

        Raises:
            CardanError: that of ``fail``, once all news were taken.
        """
        while not self._by_choice and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        if self._by_choice:
            waiting = self._by_choice.pop(next(iter(self._by_choice)))
            return waiting.output() if isinstance(waiting, _Gathered) else waiting
        assert self._error is not None
        raise self._error


@dataclass(slots=True)
class OpenRequest:
    """One request under way.

    Attributes:
        rid: the caller's id.
        prompt_ids: the prompt.
        prompt_start: from where prompt logprobs were asked for, or None.
        arrival_s: on the monotonic clock.
        choices: totals of the choices that have not ended, by wire id.
        pending: news for the consumer.
    """

    rid: str
    prompt_ids: tuple[int, ...]
    prompt_start: int | None
    arrival_s: float
    choices: dict[str, _Choice] = field(default_factory=dict)
    pending: Pending = field(default_factory=Pending)

    def take(self, news: TextNews) -> GenerateOutput:
        """Turn news of a choice into what the consumer gets; a choice that ended is forgotten."""
        choice = self.choices[news.wire_id]
        e2e_s = time.monotonic() - self.arrival_s
        choice.num_tokens += len(news.token_ids)
        if news.token_ids and choice.first_token_s is None:
            choice.first_token_s = e2e_s
        fresh = news.details or _NO_DETAILS
        choice.details = totals = news.details or choice.details or _NO_DETAILS
        if fresh.finish is not None:
            del self.choices[news.wire_id]
        has_prompt = bool(fresh.prompt_logprobs) and self.prompt_start is not None
        return GenerateOutput(
            rid=self.rid,
            index=choice.index,
            text=news.text,
            token_ids=news.token_ids,
            logprobs=fresh.logprobs,
            prompt_logprobs=fresh.prompt_logprobs,
            embedding=fresh.embedding,
            hidden_states=fresh.hidden_states,
            prompt_token_ids=self.prompt_ids[self.prompt_start : totals.prompt_tokens] if has_prompt else (),
            finish_reason=fresh.finish,
            prompt_tokens=totals.prompt_tokens or len(self.prompt_ids),
            completion_tokens=choice.num_tokens,
            cached_tokens=totals.cached_tokens,
            num_retractions=totals.num_retractions,
            max_new_tokens_clamped=totals.max_new_tokens_clamped,
            truncated_from=totals.truncated_from,
            times=RequestTimes(queue_s=totals.queue_s, first_token_s=choice.first_token_s, e2e_s=e2e_s),
        )


_NO_DETAILS = Details(None, 0, 0, 0, 0.0)


class OpenRequests:
    """All open requests of a frontend."""

    def __init__(self) -> None:
        self._by_rid: dict[str, OpenRequest] = {}
        self._by_wire_id: dict[str, OpenRequest] = {}
        self._numbers = itertools.count(1)
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._by_rid)

    @property
    def rids(self) -> list[str]:
        """Ids of all open requests, oldest first."""
        return list(self._by_rid)

    def check_rid(self, rid: str | None) -> None:
        """Refuse an id that is open.

        Raises:
            RequestError: it is.
        """
        if rid in self._by_rid:
            raise RequestError(
                f"A request with rid {rid!r} is open already. Ids must be unique among open requests; "
                "leave rid out for a fresh one.",
                param="rid",
                code="duplicate_rid",
            )

    def open(
        self,
        request: GenerateRequest,
        prompt_ids: tuple[int, ...],
        arrival_s: float,
        truncated_from: int | None = None,
    ) -> tuple[OpenRequest, list[Generate]]:
        """Enter a request; returns it and one message for each of its choices, seeded ``seed + index``.

        Args:
            request: what the caller asks.
            prompt_ids: its prompt, cut where it had to be.
            arrival_s: when it came, on the monotonic clock.
            truncated_from: length of the prompt before it was cut, or None.
        """
        self.check_rid(request.rid)
        rid = request.rid or f"req-{next(self._numbers)}"
        while request.rid is None and rid in self._by_rid:
            rid = f"req-{next(self._numbers)}"
        vectors = request.input_embeds
        embeds = None if vectors is None else vectors[: len(prompt_ids)].tobytes()
        opened = OpenRequest(rid, prompt_ids, request.logprobs.prompt_start, arrival_s)
        messages = []
        for index in range(request.sampling.n):
            wire_id = f"{rid}.{next(self._numbers)}"
            opened.choices[wire_id] = _Choice(index)
            self._by_wire_id[wire_id] = opened
            seed = request.sampling.seed
            messages.append(
                Generate(
                    wire_id=wire_id,
                    prompt_ids=list(prompt_ids),
                    sampling=replace(request.sampling, n=1, seed=None if seed is None else (seed + index) % 2**64),
                    logprobs=request.logprobs,
                    priority=request.priority,
                    cache_salt=request.cache_salt,
                    routing_key=request.routing_key,
                    arrival_s=arrival_s,
                    truncated_from=truncated_from,
                    pooling=request.pooling,
                    hidden_states=request.hidden_states,
                    embeds=embeds,
                    forced_output_ids=request.forced_output_ids,
                    processor=request.processor,
                )
            )
        self._by_rid[rid] = opened
        self._empty.clear()
        return opened, messages

    def deliver(self, news: TextNews) -> None:
        """Pass news to the consumer; news of a choice that nobody waits for are dropped."""
        opened = self._by_wire_id.get(news.wire_id)
        if opened is None:
            return
        output = opened.take(news)
        if output.finish_reason is not None and output.finish_reason.refused:
            return  # the refusal itself comes straight from the scheduler, before this or after it
        if output.finish_reason is not None:
            del self._by_wire_id[news.wire_id]
        opened.pending.put(output)

    def reject(self, wire_id: str, error: CardanError) -> None:
        """End a request with an error."""
        opened = self._by_wire_id.pop(wire_id, None)
        if opened is not None:
            opened.choices.pop(wire_id, None)  # news of its end may follow, and mean nothing any more
            opened.pending.fail(error)

    def fail_all(self, error: CardanError) -> None:
        """End every open request with an error."""
        for opened in self._by_rid.values():
            # Each gets an exception of its own: one that is raised many times keeps every traceback.
            opened.pending.fail(type(error)(*error.args))

    def wire_ids(self, rid: str) -> list[str]:
        """Wire ids of the choices of a request that have not ended."""
        opened = self._by_rid.get(rid)
        return [] if opened is None else list(opened.choices)

    def close(self, opened: OpenRequest) -> list[str]:
        """Forget a request; returns the wire ids of choices that have not ended, which should be aborted."""
        unfinished = list(opened.choices)
        for wire_id in unfinished:
            self._by_wire_id.pop(wire_id, None)
        self._by_rid.pop(opened.rid, None)
        if not self._by_rid:
            self._empty.set()
        return unfinished

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until no request is open. Returns False when the time ran out."""
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return False
        return True
