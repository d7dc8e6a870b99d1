"""The scheduler process: it owns the device, takes requests from its inbox, and sends tokens to the detokenizer.

Array libraries are imported here only, by the platform. With nothing to run it sleeps on its inbox.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import zmq

from cardan.config import EngineConfig
from cardan.engine.channels import DETOKENIZER_INBOX, FRONTEND_INBOX, SCHEDULER_INBOX, Outbox, open_inbox
from cardan.engine.core import EngineCore
from cardan.engine.logit_processors import LogitProcessors
from cardan.engine.messages import (
    SCHEDULER_DECODER,
    Abort,
    Details,
    ErrorReport,
    Failed,
    FlushCache,
    FlushReply,
    Generate,
    GetStats,
    OpenStream,
    ProfileReply,
    Progress,
    Rejected,
    SchedulerReady,
    Shutdown,
    StartProfile,
    StatsReply,
    StopProfile,
    TokenBatch,
    TokenNews,
    ToScheduler,
    encode,
)
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.preparation import Prepared, prepare
from cardan.engine.process_log import set_up_logging
from cardan.engine.validation import lacking_features
from cardan.errors import CardanError
from cardan.platform import Feature
from cardan.platform.report import plan_to_json
from cardan.scheduler import OutputBatch, RequestOutput
from cardan.text.tokenizer import Tokenizer

_LAST_WORDS_MS = 1000
_STALLED_POLL_MS = 5
"""How long to sleep when requests wait but no step can run."""
_GRAMMAR_POLL_MS = 2
"""How long to sleep at most while requests wait for their grammars only."""
_IDLE_POLL_MS = 1000
"""How long to sleep at most when there is nothing to run."""

logger = logging.getLogger(__name__)


def run(config: EngineConfig, folder: Path) -> int:
    """Prepare the device and serve until told to end. Returns the exit code."""
    set_up_logging("scheduler", config.server)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = open_inbox(context, folder, SCHEDULER_INBOX)
    frontend = Outbox(context, folder, FRONTEND_INBOX)
    detokenizer = Outbox(context, folder, DETOKENIZER_INBOX)
    try:
        prepared, tokenizer = _prepare(config, frontend)
        processors = None
        if config.scheduler.enable_custom_logit_processor:
            processors = LogitProcessors(prepared.settings.vocab_size, hidden=_why_logits_are_hidden(prepared))
        core = EngineCore(prepared, tokenizer, profile_folder=config.server.profile_folder, processors=processors)
        _log_plan(prepared)
        # What is there now stays: full collections would walk all of it, and every stream would wait for them.
        gc.freeze()
        frontend.send(encode(_ready(prepared)))
        SchedulerServer(core, inbox, frontend, detokenizer).serve()
        prepared.close()
    except Exception as error:
        if not isinstance(error, CardanError):
            logger.error("the scheduler failed", exc_info=error)
        frontend.send(encode(Failed("scheduler", ErrorReport.of(error))))
        return 1
    finally:
        inbox.close()
        detokenizer.close()
        frontend.close(_LAST_WORDS_MS)
        context.term()
    return 0


def _prepare(config: EngineConfig, frontend: Outbox) -> tuple[Prepared, Tokenizer]:
    """Prepare the device, and load the tokenizer, which stops are sought with, in the meantime."""

    def tell(part: str, done: int, total: int) -> None:
        frontend.send(encode(Progress(part, done, total)))

    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as beside:
        tokenizer = beside.submit(load_model_tokenizer, config.model, renders_chat=False)
        return prepare(config, tell), tokenizer.result()


def _why_logits_are_hidden(prepared: Prepared) -> str | None:
    capabilities = prepared.opened.platform.capabilities(prepared.plan.device)
    shows = capabilities.supports(Feature.HOST_LOGITS)
    return None if shows else capabilities.get(Feature.HOST_LOGITS).reason


def _log_plan(prepared: Prepared) -> None:
    plan = prepared.plan
    logger.debug("Plan: %s on platform %s, %s", plan.model.name, plan.platform, plan.device.name)
    for name, setting in plan.settings.items():
        logger.debug("  %s = %s (%s: %s)", name, setting.value, setting.source, setting.why)
    for what, count, why in plan.memory:
        logger.debug("  memory: %s %.1f MB (%s)", what, count / 2**20, why)
    for note in plan.notes:
        logger.debug("  note: %s", note)


def _ready(prepared: Prepared) -> SchedulerReady:
    plan, platform = prepared.plan, prepared.opened.platform
    return SchedulerReady(
        model_name=prepared.opened.checkpoint.name,
        model_path=str(prepared.opened.checkpoint.path),
        platform=platform.name,
        vocab_size=plan.model.vocab_size,
        context_length=plan.context_length,
        max_input_tokens=prepared.settings.max_input_tokens,
        max_total_tokens=prepared.settings.num_slots,
        plan=plan_to_json(plan),
        started_s=prepared.started_s,
        sampling_defaults=plan.value("sampling_defaults") or {},
        lacking=lacking_features(platform.capabilities(plan.device), plan.model),
        grammar_backend=str(plan.value("grammar_backend")),
        hidden_size=plan.model.hidden_size,
    )


class SchedulerServer:
    """Connects an ``EngineCore`` to its sockets."""

    def __init__(self, core: EngineCore, inbox: zmq.Socket[bytes], frontend: Outbox, detokenizer: Outbox) -> None:
        self._core = core
        self._inbox = inbox
        self._frontend = frontend
        self._detokenizer = detokenizer
        self._stalled = False

    def serve(self) -> None:
        """Take messages and run turns until told to end."""
        while True:
            for message in self._messages():
                if isinstance(message, Shutdown):
                    return
                self._take(message)
            for wire_id, error in self._core.take_grammars():
                self._frontend.send(encode(Rejected(wire_id, ErrorReport.of(error))))
            if self._core.has_work:
                self._stalled = not self._core.turn()
            self._send_news()

    def _messages(self) -> Iterator[ToScheduler]:
        """What has arrived; sleeps until something does when there is nothing to run."""
        timeout_ms = _IDLE_POLL_MS
        if self._core.has_work:
            timeout_ms = _STALLED_POLL_MS if self._stalled else 0
        elif self._core.awaits_grammars:
            timeout_ms = _GRAMMAR_POLL_MS
        while self._inbox.poll(timeout_ms):
            timeout_ms = 0
            yield SCHEDULER_DECODER.decode(self._inbox.recv())

    def _take(self, message: ToScheduler) -> None:
        match message:
            case Generate():
                self._add(message)
            case Abort():
                self._core.abort(message.wire_id)
            case FlushCache():
                self._frontend.send(encode(FlushReply(message.call_id, self._core.flush_cache())))
            case GetStats():
                self._frontend.send(encode(StatsReply(message.call_id, self._core.stats())))
            case StartProfile() | StopProfile():
                self._frontend.send(encode(self._profile(message)))

    def _profile(self, message: StartProfile | StopProfile) -> ProfileReply:
        try:
            if isinstance(message, StopProfile):
                return ProfileReply(message.call_id, path=self._core.stop_profile())
            self._core.start_profile(message.num_steps)
        except CardanError as error:
            return ProfileReply(message.call_id, error=ErrorReport.of(error))
        return ProfileReply(message.call_id)

    def _add(self, message: Generate) -> None:
        try:
            self._core.add(message)
        except CardanError as error:
            self._frontend.send(encode(Rejected(message.wire_id, ErrorReport.of(error))))
        else:
            self._detokenizer.send(encode(OpenStream(message.wire_id, message.sampling)))

    def _send_news(self) -> None:
        for news in self._core.take_news():
            self._detokenizer.send(encode(_token_batch(news)))


def _token_batch(news: OutputBatch) -> TokenBatch:
    return TokenBatch(news.rids, news.token_ids, [_token_news(output) for output in news.detailed])


def _token_news(output: RequestOutput) -> TokenNews:
    details = Details(
        finish=output.finish_reason,
        prompt_tokens=output.num_prompt_tokens,
        cached_tokens=output.num_cached_tokens,
        num_retractions=output.num_retractions,
        queue_s=output.queue_s,
        max_new_tokens_clamped=output.max_new_tokens_clamped,
        truncated_from=output.truncated_from,
        logprobs=output.logprobs,
        prompt_logprobs=output.prompt_logprobs,
        embedding=output.embedding,
        hidden_states=output.hidden,
    )
    return TokenNews(output.rid, list(output.new_token_ids), details)
