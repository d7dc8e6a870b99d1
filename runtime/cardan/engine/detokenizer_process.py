"""The detokenizer process: tokens in from the scheduler, text out to the frontend.

It imports no platform, no model and no scheduler.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from pathlib import Path

import zmq

from cardan.config import EngineConfig
from cardan.engine.channels import DETOKENIZER_INBOX, FRONTEND_INBOX, Outbox, open_inbox
from cardan.engine.detokenizer import Detokenizer
from cardan.engine.messages import (
    DETOKENIZER_DECODER,
    DetokenizerReady,
    ErrorReport,
    Failed,
    OpenStream,
    Shutdown,
    ToDetokenizer,
    encode,
)
from cardan.engine.model_files import load_model_tokenizer
from cardan.engine.process_log import set_up_logging

_MAX_MERGED = 64
"""Most messages whose news are merged into one."""
_LAST_WORDS_MS = 1000

logger = logging.getLogger(__name__)


def run(config: EngineConfig, folder: Path) -> int:
    """Serve until told to end. Returns the exit code."""
    set_up_logging("detokenizer", config.server)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    inbox = open_inbox(context, folder, DETOKENIZER_INBOX)
    outbox = Outbox(context, folder, FRONTEND_INBOX)
    try:
        tokenizer = load_model_tokenizer(config.model, renders_chat=False)
        detokenizer = Detokenizer(tokenizer, config.server.stream_interval)
        # What is there now stays: full collections would walk all of it, and every stream would wait for them.
        gc.freeze()
        outbox.send(encode(DetokenizerReady()))
        _serve(detokenizer, inbox, outbox)
    except Exception as error:
        logger.error("the detokenizer failed", exc_info=error)
        outbox.send(encode(Failed("detokenizer", ErrorReport.of(error))))
        return 1
    finally:
        inbox.close()
        outbox.close(_LAST_WORDS_MS)
        context.term()
    return 0


def _serve(detokenizer: Detokenizer, inbox: zmq.Socket[bytes], outbox: Outbox) -> None:
    while True:
        for message in _arrived(inbox):
            if isinstance(message, Shutdown):
                return
            if isinstance(message, OpenStream):
                detokenizer.open(message)
            else:
                detokenizer.take(message)
        news = detokenizer.flush()
        if news is not None:
            outbox.send(encode(news))


def _arrived(inbox: zmq.Socket[bytes]) -> Iterator[ToDetokenizer]:
    """Wait for a message, and give it with those that have arrived behind it."""
    yield DETOKENIZER_DECODER.decode(inbox.recv())
    for _ in range(_MAX_MERGED - 1):
        if not inbox.poll(0):
            return
        yield DETOKENIZER_DECODER.decode(inbox.recv())
