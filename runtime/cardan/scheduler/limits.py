"""Limits of one request: what is refused, what is cut, what is clamped.

It knows no other request and no queue.
"""

from __future__ import annotations

import hashlib

from cardan.errors import PromptTooLongError, RequestError
from cardan.scheduler.request import Request
from cardan.scheduler.settings import SchedulerSettings


def check_request(request: Request, settings: SchedulerSettings) -> None:
    """Check a request on its own.

    Raises:
        RequestError: it is empty, has ids out of the vocabulary, or asks for logprobs beyond its prompt.
        PromptTooLongError: its prompt does not fit and may not be cut.
    """
    _check_ids(request, settings)
    _check_params(request, settings)
    _check_length(request, settings)
    start = request.logprobs.prompt_start
    if start is not None and not 0 <= start <= request.num_prompt:
        raise RequestError(
            f"Prompt logprobs must start within the prompt of {request.num_prompt} tokens, got position {start}.",
            param="logprob_start_len",
        )


def _check_ids(request: Request, settings: SchedulerSettings) -> None:
    prompt = request.prompt
    if prompt.shape[0] == 0:
        raise RequestError("The prompt is empty; give at least one token.", param="prompt")
    lowest, highest = int(prompt.min()), int(prompt.max())
    if lowest < 0 or highest >= settings.vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise RequestError(
            f"Token ids must be between 0 and {settings.vocab_size - 1}, got {wrong}. "
            "Tokenize with this model's tokenizer.",
            param="input_ids",
        )


def _check_params(request: Request, settings: SchedulerSettings) -> None:
    if request.params.max_new_tokens < 0:
        raise RequestError(
            f"max_new_tokens must be 0 or more, got {request.params.max_new_tokens}.", param="max_new_tokens"
        )
    if request.calls_checker is False and (request.params.stop or request.params.stop_regex):
        raise RequestError("A request with stop strings or stop regexes must bring a stop checker.", param="stop")
    for token_id in request.params.logit_bias:
        if not 0 <= token_id < settings.vocab_size:
            raise RequestError(
                f"logit_bias must name token ids between 0 and {settings.vocab_size - 1}, got {token_id}.",
                param="logit_bias",
            )


def _check_length(request: Request, settings: SchedulerSettings) -> None:
    longest = settings.max_input_tokens
    if request.num_prompt <= longest:
        return
    if settings.allow_auto_truncate:
        request.cut_prompt(longest)
        return
    raise prompt_too_long(request.num_prompt, longest, settings.context_length, settings.num_slots)


def prompt_too_long(num_tokens: int, longest: int, context_length: int, num_slots: int) -> PromptTooLongError:
    """The error for a prompt of which at most ``longest`` tokens fit."""
    return PromptTooLongError(
        f"The prompt has {num_tokens} tokens, but at most {longest} fit (context length "
        f"{context_length}, KV pool {num_slots} tokens). Shorten it, or start the server with "
        "--allow-auto-truncate.",
        param="prompt",
        code="context_length_exceeded",
    )


def clamp_output(request: Request, settings: SchedulerSettings) -> None:
    """Set the limit of the output so that input, output and one page fit the context and the pool."""
    room = min(
        settings.context_length - request.num_prompt,
        settings.num_slots - request.num_prompt - settings.page_size - 1,
    )
    request.max_new_tokens = min(request.params.max_new_tokens, room)
    if request.max_new_tokens < request.params.max_new_tokens:
        request.max_new_tokens_clamped = request.max_new_tokens


def choose_seed(request: Request, random_seed: int) -> None:
    """Set the key of the request's sampling noise: its own seed, or one drawn from ``random_seed`` and its arrival."""
    if request.params.seed is not None:
        request.seed = request.params.seed % 2**64
        return
    text = f"{random_seed}:{request.order}".encode()
    request.seed = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")
