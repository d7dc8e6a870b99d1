"""What Ollama's routes say of the served model: tags, details, and that it is loaded.

It knows no generation.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from cardan.errors import RequestError
from cardan.server.chats.preparation import answer_format
from cardan.server.http.bodies import parse_body, read_object
from cardan.server.http.replies import JsonResponse
from cardan.server.ollama.bodies import ShowBody
from cardan.server.state import ServerState, state_of

TAG = ":latest"
"""What Ollama's clients add to names without a tag."""

STAYS_LOADED = timedelta(days=36500)
"""A server's model is never unloaded; clients want a date all the same."""


def stamp(seconds: float) -> str:
    """A moment in Unix time as RFC 3339 writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def check_model(state: ServerState, name: str | None) -> None:
    """``state.check_model`` for a name that may end in ``:latest``.

    Raises:
        UnknownModelError: another model is asked for.
    """
    if name is not None and name != state.model_name:
        name = name.removesuffix(TAG)
    state.check_model(name)


async def version(request: Request) -> Response:
    """GET ``/api/version``."""
    return JsonResponse({"version": state_of(request).engine.info.version})


async def tags(request: Request) -> Response:
    """GET ``/api/tags``."""
    return JsonResponse({"models": [_tag(state_of(request))]})


async def running(request: Request) -> Response:
    """GET ``/api/ps``."""
    state = state_of(request)
    model = _tag(state)
    del model["modified_at"]
    model["expires_at"] = stamp(state.created + STAYS_LOADED.total_seconds())
    model["size_vram"] = model["size"]
    model["context_length"] = state.engine.info.context_length
    return JsonResponse({"models": [model]})


async def show(request: Request) -> Response:
    """POST ``/api/show``."""
    state = state_of(request)
    body = parse_body(ShowBody, await read_object(request, state.config.server.max_body_bytes))
    if body.model is None and body.name is None:
        raise RequestError("'model' is required.", param="model", code="missing_required_parameter")
    check_model(state, body.model or body.name)
    facts, info = _facts(state), state.engine.info
    family = facts.get("family", "")
    templates = state.engine.tokenizer.chat_templates
    about = {
        "general.architecture": family,
        "general.basename": info.model_name,
        "general.parameter_count": facts.get("num_parameters"),
        f"{family}.context_length": info.context_length,
        f"{family}.block_count": facts.get("num_layers"),
        f"{family}.embedding_length": facts.get("hidden_size"),
        f"{family}.vocab_size": info.vocab_size,
    }
    return JsonResponse(
        {
            "modelfile": f"FROM {info.model_name}\n",
            "parameters": "\n".join(f"{name} {value:g}" for name, value in info.sampling_defaults.items()),
            "template": next(iter(templates.values()), ""),
            "details": _details(state),
            "model_info": {name: value for name, value in about.items() if value is not None},
            "capabilities": _capabilities(state),
            "modified_at": stamp(state.created),
        }
    )


def _capabilities(state: ServerState) -> list[str]:
    form = answer_format(state)
    if state.config.model.is_embedding:
        return ["embedding"]
    found = {"completion": True, "tools": form.tools is not None, "thinking": form.reasoning is not None}
    return [name for name, able in found.items() if able]


def _facts(state: ServerState) -> dict[str, Any]:
    facts: dict[str, Any] = state.engine.info.plan.get("model") or {}
    return facts


def _tag(state: ServerState) -> dict[str, Any]:
    name = state.model_name
    return {
        "name": name,
        "model": name,
        "modified_at": stamp(state.created),
        "size": _facts(state).get("weight_bytes", 0),
        # It names the model, as a client needs it; the weights are not read for it.
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(state),
    }


def _details(state: ServerState) -> dict[str, Any]:
    facts = _facts(state)
    family = facts.get("family", "")
    formats: dict[str, int] = facts.get("weight_formats") or {}
    parameters = facts.get("num_parameters", 0)
    return {
        "parent_model": "",
        "format": "gguf" if state.engine.info.model_path.endswith(".gguf") else "safetensors",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": f"{parameters / 1e9:.2f}B" if parameters >= 1e9 else f"{parameters / 1e6:.2f}M",
        "quantization_level": max(formats, key=lambda name: formats[name], default=""),
    }
