"""The log of requests: one record for each choice that ended, with lengths and times, and contents only when asked for.

It knows no API's form of a request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from cardan.config import ServerConfig
from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.text.tokenizer import Tokenizer

LONGEST_CONTENTS = 16384
"""Characters of a prompt or an answer that are logged; the rest is cut off."""

logger = logging.getLogger("cardan.server")


class RequestLog:
    """Watches the outputs of one HTTP request and logs what ends."""

    def __init__(self, server: ServerConfig, requests: Sequence[GenerateRequest], tokenizer: Tokenizer) -> None:
        """Take the prompts, which are kept only where ``server`` wants contents in its log."""
        self._requests = requests if server.log_request_contents else ()
        self._tokenizer = tokenizer
        self._texts: dict[tuple[int, int], str] = {}

    def see(self, prompt_index: int, output: GenerateOutput) -> None:
        """Take one output of a prompt."""
        if self._requests:
            key = (prompt_index, output.index)
            text = self._texts.get(key, "")
            self._texts[key] = text + output.text if len(text) <= LONGEST_CONTENTS else text
        if output.finish_reason is not None:
            self._log(prompt_index, output)

    def close(self) -> None:
        """Choices that did not end are not logged: the client left."""

    def _log(self, prompt_index: int, output: GenerateOutput) -> None:
        reason = output.finish_reason.kind.value if output.finish_reason else "unknown"
        fields: dict[str, Any] = {
            "rid": output.rid,
            "choice": output.index,
            "finish_reason": reason,
            "prompt_tokens": output.prompt_tokens,
            "cached_tokens": output.cached_tokens,
            "completion_tokens": output.completion_tokens,
            "num_retractions": output.num_retractions,
            "queue_s": round(output.times.queue_s, 6),
            "first_token_s": None if output.times.first_token_s is None else round(output.times.first_token_s, 6),
            "e2e_s": round(output.times.e2e_s, 6),
        }
        message = (
            f"request {output.rid} choice {output.index}: {reason}, prompt {output.prompt_tokens}, cached "
            f"{output.cached_tokens}, output {output.completion_tokens} tokens, queued {output.times.queue_s:.3f} s, "
            f"first token {output.times.first_token_s or 0.0:.3f} s, {output.times.e2e_s:.3f} s"
        )
        if self._requests:
            fields["prompt"] = self._prompt(self._requests[prompt_index])
            fields["text"] = self._texts.pop((prompt_index, output.index), "")[:LONGEST_CONTENTS]
            message += f", prompt {fields['prompt']!r}, text {fields['text']!r}"
        logger.info("%s", message, extra={"fields": fields})

    def _prompt(self, request: GenerateRequest) -> str:
        if request.text is not None:
            return request.text[:LONGEST_CONTENTS]
        # A token has at least a byte, mostly more: no more of them are decoded than can be shown. A model may have ids
        # beyond its tokenizer's, which are no text.
        known = self._tokenizer.vocab_size
        ids = [token for token in (request.input_ids or ())[:LONGEST_CONTENTS] if token < known]
        return self._tokenizer.decode(ids, skip_special_tokens=False)[:LONGEST_CONTENTS]
