"""``/v1/embeddings`` and Ollama's ``/api/embed``: texts as vectors of length 1.

It does not know where a vector comes from; the engine pools hidden states.
"""

from __future__ import annotations

import base64
import uuid
from typing import Annotated, Any, Literal, cast

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cardan.engine.api import GenerateRequest
from cardan.errors import RequestError
from cardan.server.generation import Job, admitted, check_complete, run_job
from cardan.server.http.bodies import (
    Body,
    IdLists,
    Ids,
    Refusal,
    Texts,
    is_anything,
    is_one_of,
    parse_body,
    read_object,
)
from cardan.server.http.disconnects import while_connected
from cardan.server.http.replies import JsonResponse
from cardan.server.ollama.models import check_model
from cardan.server.prompts import MAX_PROMPTS, check_prompt_ids
from cardan.server.state import ServerState, state_of
from cardan.types import Pooling, SamplingParams

_REFUSED = {"user": Refusal("it only labels a request.", is_anything)}
_OLLAMA_REFUSED = {
    "keep_alive": Refusal("the model stays loaded.", is_anything),
    "truncate": Refusal("texts are not cut; send what fits.", is_one_of(False)),
    "options": Refusal("nothing about embeddings can be chosen by a request.", is_one_of({})),
}

Vector = list[float]


class EmbeddingsBody(Body):
    """Body of ``/v1/embeddings``."""

    model: str | None = None
    input: str | Texts | Ids | IdLists
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None


class EmbedBody(Body):
    """Body of ``/api/embed``."""

    model: Annotated[str, Field(min_length=1)]
    input: str | Texts
    dimensions: Annotated[int, Field(ge=1)] | None = None


async def embeddings(request: Request) -> Response:
    """POST ``/v1/embeddings``."""
    state = state_of(request)
    state.check_accepting()
    body = parse_body(EmbeddingsBody, await read_object(request, state.config.server.max_body_bytes), _REFUSED)
    state.check_model(body.model)
    with admitted(state, _build_job(state, _inputs(body.input))) as job:
        vectors, tokens = await while_connected(request, _embed(state, job, body.dimensions))
    data = [
        {"object": "embedding", "index": index, "embedding": _encode(vector, body.encoding_format)}
        for index, vector in enumerate(vectors)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return JsonResponse({"object": "list", "data": data, "model": state.model_name, "usage": usage})


async def ollama_embed(request: Request) -> Response:
    """POST ``/api/embed``."""
    state = state_of(request)
    state.check_accepting()
    body = parse_body(EmbedBody, await read_object(request, state.config.server.max_body_bytes), _OLLAMA_REFUSED)
    check_model(state, body.model)
    with admitted(state, _build_job(state, _inputs(body.input))) as job:
        vectors, tokens = await while_connected(request, _embed(state, job, body.dimensions))
    return JsonResponse({"model": body.model, "embeddings": vectors, "prompt_eval_count": tokens})


def _inputs(value: str | list[str] | list[int] | list[list[int]]) -> list[str | list[int]]:
    if isinstance(value, str):
        return [value]
    items = cast("list[Any]", value)
    return [items] if items and isinstance(items[0], int) else items


def _build_job(state: ServerState, inputs: list[str | list[int]]) -> Job:
    if not inputs or len(inputs) > MAX_PROMPTS:
        raise RequestError(f"'input' must hold 1 to {MAX_PROMPTS} texts, got {len(inputs)}.", param="input")
    info = state.engine.info
    prefix = f"embd-{uuid.uuid4().hex}"
    requests = []
    for i, item in enumerate(inputs):
        text, ids = None, None
        if isinstance(item, str):
            state.check_text(item, "input")
            text = item
        else:
            state.check_ids_length(item, "input")
            ids = check_prompt_ids(item, info.vocab_size, "input", info.max_input_tokens)
        requests.append(
            GenerateRequest(
                text=text,
                input_ids=ids,
                sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
                rid=prefix if len(inputs) == 1 else f"{prefix}-{i}",
                pooling=Pooling(state.config.model.embedding_pooling),
            )
        )
    return Job(prefix, tuple(requests))


async def _embed(state: ServerState, job: Job, dimensions: int | None) -> tuple[list[Vector], int]:
    """Vectors of all prompts, and how many tokens those had."""
    vectors: list[Vector] = [[] for _ in job.requests]
    tokens = 0
    async for index, output in run_job(state, job):
        check_complete(output.finish_reason)
        if output.finish_reason is not None:
            vectors[index] = _normalized(output.embedding, dimensions)
            tokens += output.prompt_tokens
    return vectors, tokens


def _normalized(hidden: tuple[float, ...], dimensions: int | None) -> Vector:
    """The first ``dimensions`` of a hidden state, at length 1."""
    if dimensions is not None and dimensions > len(hidden):
        raise RequestError(
            f"'dimensions' is {dimensions}, but this model's embeddings have {len(hidden)}. Send at most that.",
            param="dimensions",
            code="invalid_value",
        )
    vector = np.asarray(hidden[:dimensions], dtype=np.float64)
    length = float(np.linalg.norm(vector))
    unit: Vector = (vector / length if length else vector).tolist()
    return unit


def _encode(vector: Vector, encoding: str) -> Any:
    """Numbers, or the bytes of float32 in little-endian order as base64."""
    if encoding == "float":
        return vector
    return base64.b64encode(np.asarray(vector, dtype="<f4").tobytes()).decode()
