"""Reads request bodies: size limit, strict JSON, checked fields; nothing is accepted and ignored.

It knows no route and no engine: each route brings its body class and its table of refused fields.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, cast

import msgspec
from pydantic import BaseModel, ConfigDict, FailFast, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from cardan.errors import RequestError

MAX_SHOWN = 80
"""Longest piece of a wrong value that an error message repeats, in characters."""

BodyT = TypeVar("BodyT", bound="Body")


class _FirstError(FailFast):
    """pydantic's own cannot stand in a union, since it has no hash."""

    def __hash__(self) -> int:
        return hash(type(self))


Texts = Annotated[list[str], _FirstError()]
"""A list of texts. Of many wrong entries the first is found, and no others are looked for."""

Ids = Annotated[list[int], _FirstError()]
"""Likewise of token ids."""

IdLists = Annotated[list[Ids], _FirstError()]
"""Likewise of lists of token ids."""

_REPR = reprlib.Repr()
_REPR.maxlist = _REPR.maxdict = 16
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 200


class Body(BaseModel):
    """Base of all bodies: strict types, frozen, unknown fields refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _never(_value: object) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Refusal:
    """A field that means something elsewhere and is not supported here.

    Attributes:
        reason: what is unsupported, and what works instead; completes "``field`` is not supported: …".
        harmless: says whether a value asks for nothing, so that it may be accepted.
    """

    reason: str
    harmless: Callable[[object], bool] = _never


def is_one_of(*values: object) -> Callable[[object], bool]:
    """A test for one of a few harmless values; ``True`` and ``1`` are kept apart."""
    return lambda value: any(type(value) is type(option) and value == option for option in values)


def is_anything(_value: object) -> bool:
    """Every value is harmless (fields that only label a request)."""
    return True


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The whole body, at most ``max_bytes`` long; the limit holds with and without a content length.

    Raises:
        HTTPException: 413 for a longer body, 415 for one that is compressed.
        ClientDisconnect: the client left while sending.
    """
    encoding = request.headers.get("content-encoding", "")
    if encoding.strip().lower() not in ("", "identity"):
        raise HTTPException(
            415,
            f"The request body has the Content-Encoding '{shorten(encoding)}'. Send it as it is, without that header.",
        )
    too_large = HTTPException(
        413, f"The request body is larger than {max_bytes} bytes. Send less, or raise --max-body-bytes."
    )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise too_large
        chunks.append(chunk)
    return b"".join(chunks)


def decode_object(data: bytes) -> dict[str, Any]:
    """Decode a JSON object; NaN, Infinity, numbers out of range and invalid UTF-8 are errors.

    Raises:
        RequestError: the bytes are no JSON object.
    """
    if not data.strip():
        raise RequestError("The request body is empty; a JSON object is expected.", code="invalid_json")
    try:
        value = msgspec.json.decode(data)
    except RecursionError:
        raise RequestError("The JSON body is nested too deeply.", code="invalid_json") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(
            f"The request body is not valid JSON: {error}. Send one JSON object, encoded as UTF-8.",
            code="invalid_json",
        ) from None
    if not isinstance(value, dict):
        raise RequestError(f"The request body must be a JSON object, got {_json_type(value)}.", code="invalid_json")
    return cast("dict[str, Any]", value)


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """``read_body`` and ``decode_object`` in one."""
    return decode_object(await read_body(request, max_bytes))


def parse_body(
    kind: type[BodyT],
    data: Mapping[str, Any],
    refused: Mapping[str, Refusal] | None = None,
    prefix: str = "",
) -> BodyT:
    """Check a JSON object against its body class. ``null`` means the same as leaving a known field out.

    Args:
        kind: the body class.
        data: the decoded object.
        refused: fields that mean something elsewhere, with why they are refused here.
        prefix: put before field names in messages, such as ``sampling_params.``.

    Raises:
        RequestError: a field is unknown, refused, or wrong; ``param`` names it.
    """
    kept: dict[str, Any] = {}
    for name, value in drop_refused(data, refused or {}, prefix).items():
        if name not in kind.model_fields:
            raise _unknown_field(name, [*kind.model_fields], prefix)
        if value is not None:
            kept[name] = value
    try:
        return kind.model_validate(kept)
    except ValidationError as error:
        raise _as_request_error(error, prefix) from None


def drop_refused(data: Mapping[str, Any], refused: Mapping[str, Refusal], prefix: str = "") -> dict[str, Any]:
    """The fields that stand in no table of refusals; those that do must be null or harmless.

    Raises:
        RequestError: a refused field asks for something.
    """
    kept: dict[str, Any] = {}
    for name, value in data.items():
        if name in refused:
            _check_refused(prefix + name, value, refused[name])
        else:
            kept[name] = value
    return kept


def _check_refused(name: str, value: object, refusal: Refusal) -> None:
    if value is None or refusal.harmless(value):
        return
    raise RequestError(f"'{name}' is not supported: {refusal.reason}", param=name, code="unsupported_parameter")


def _unknown_field(name: str, known: list[str], prefix: str) -> RequestError:
    shown = shorten(name)
    close = difflib.get_close_matches(name[:MAX_SHOWN], known, n=1)
    advice = f"Did you mean '{prefix}{close[0]}'?" if close else f"Known fields: {', '.join(sorted(known))}."
    return RequestError(f"Unknown field '{prefix}{shown}'. {advice}", param=prefix + shown, code="unknown_parameter")


def _as_request_error(error: ValidationError, prefix: str) -> RequestError:
    first = error.errors(include_url=False)[0]
    # Steps that pydantic adds for the branches of a union are in brackets or type names; field names are not.
    param = prefix + ".".join(str(step) for step in first["loc"])
    if first["type"] == "missing":
        return RequestError(f"'{param}' is required.", param=param, code="missing_required_parameter")
    cause = first.get("ctx", {}).get("error")
    if first["type"] == "value_error" and cause is not None:
        return RequestError(f"'{param}' {cause}", param=param, code="invalid_value")
    message = first["msg"].removeprefix("Input ")
    return RequestError(f"'{param}' {message}, got {shown(first['input'])}.", param=param, code="invalid_value")


def shown(value: object) -> str:
    """A value as an error message may repeat it, however large it is."""
    return shorten(_REPR.repr(value))


def shorten(text: str) -> str:
    """The text, cut to what an error message may repeat."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _json_type(value: object) -> str:
    names = {list: "an array", str: "a string", bool: "a boolean", int: "a number", float: "a number"}
    return names.get(type(value), "null")
