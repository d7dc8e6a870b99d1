"""``/v1/score``: how likely certain tokens are to follow a query and each of some items.

It knows no template: query and items are joined as they are.
"""

from __future__ import annotations

import math
import uuid
from typing import Annotated

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import GenerateRequest
from cardan.engine.validation import MAX_TOP_LOGPROBS
from cardan.errors import RequestError
from cardan.server.generation import Choice, Job, admitted, check_complete, new_choices, run_to_end
from cardan.server.http.bodies import Body, IdLists, Ids, Texts, parse_body, read_object
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import JsonResponse
from cardan.server.openai.usage import usage_object
from cardan.server.prompts import MAX_PROMPTS, check_prompt_ids
from cardan.server.sampling import check_token_ids
from cardan.server.state import ServerState, state_of
from cardan.types import LogprobParams, SamplingParams


class ScoreBody(Body):
    """Body of ``/v1/score``. Query and items are texts, or token ids."""

    model: str | None = None
    query: str | Ids
    items: str | Texts | IdLists
    label_token_ids: Annotated[Ids, Field(min_length=1, max_length=MAX_TOP_LOGPROBS)]
    apply_softmax: bool = False
    item_first: bool = False


async def score(request: Request) -> Response:
    """POST ``/v1/score``."""
    state = state_of(request)
    state.check_accepting()
    body = parse_body(ScoreBody, await read_object(request, state.config.server.max_body_bytes))
    state.check_model(body.model)
    with admitted(state, _build_job(state, body)) as job:
        choices = new_choices(job)
        await while_connected(request, run_to_end(state, job, choices))
    scores = [_scores(body, of_item[0]) for of_item in choices]
    usage = usage_object(state, choices)
    return JsonResponse({"object": "scoring", "model": state.model_name, "scores": scores, "usage": usage})


def _build_job(state: ServerState, body: ScoreBody) -> Job:
    info = state.engine.info
    check_token_ids(tuple(body.label_token_ids), info.vocab_size, "label_token_ids")
    if len(set(body.label_token_ids)) < len(body.label_token_ids):
        raise RequestError("'label_token_ids' holds an id twice. Send each once.", param="label_token_ids")
    items: list[str | list[int]] = [body.items] if isinstance(body.items, str) else list(body.items)
    if not items or len(items) > MAX_PROMPTS:
        raise RequestError(f"'items' must hold 1 to {MAX_PROMPTS} items, got {len(items)}.", param="items")
    prefix = f"score-{uuid.uuid4().hex}"
    logprobs = LogprobParams(output=True, token_ids=tuple(body.label_token_ids))
    # One greedy token; what counts is how likely the labels were in its place.
    sampling = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    requests = []
    for i, item in enumerate(items):
        text, ids = _join(state, body, item)
        rid = prefix if len(items) == 1 else f"{prefix}-{i}"
        requests.append(GenerateRequest(text=text, input_ids=ids, sampling=sampling, logprobs=logprobs, rid=rid))
    return Job(prefix, tuple(requests))


def _join(state: ServerState, body: ScoreBody, item: str | list[int]) -> tuple[str | None, tuple[int, ...] | None]:
    query = body.query
    if isinstance(query, str) and isinstance(item, str):
        text = item + query if body.item_first else query + item
        state.check_text(text, "items")
        return text, None
    if isinstance(query, list) and isinstance(item, list):
        joined = [*item, *query] if body.item_first else [*query, *item]
        state.check_ids_length(joined, "items")
        return None, check_prompt_ids(joined, state.engine.info.vocab_size, "items", state.engine.info.max_input_tokens)
    raise RequestError(
        "'query' and 'items' must be of one kind: texts, or lists of token ids.", param="items", code="invalid_value"
    )


def _scores(body: ScoreBody, choice: Choice) -> list[float]:
    """Probabilities of the labels: among all tokens, or among the labels alone."""
    check_complete(choice.finish_reason)
    first = choice.logprobs[0] if choice.logprobs else None
    known: dict[int, float] = dict(first.chosen) if first is not None else {}
    logprobs = [known.get(token, -math.inf) for token in body.label_token_ids]
    highest = max(logprobs)
    if not body.apply_softmax or highest == -math.inf:
        return [math.exp(logprob) for logprob in logprobs]
    weights = [math.exp(logprob - highest) for logprob in logprobs]
    return [weight / sum(weights) for weight in weights]
