"""Builds the OpenAPI document, and a page for people, from the table of routes and the classes of their bodies.

It knows no route in particular and no engine.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from typing import Any

from cardan.server.http.auth import OPEN_PATHS
from cardan.server.http.bodies import Body
from cardan.server.http.error_forms import anthropic_form, form_of, ollama_form
from cardan.server.http.served_route import ServedRoute
from cardan.server.openapi_answers import ANSWERS, ERRORS

Groups = Mapping[str, tuple[ServedRoute, ...]]

_ERROR_NAMES: Mapping[Callable[..., Any], str] = {anthropic_form: "AnthropicError", ollama_form: "OllamaError"}

DESCRIPTION = (
    "An engine that serves one language model. A field that is not known, or asks for what is not served, gets a 400 "
    "that names it; null means the same as leaving a field out."
)


def build_document(groups: Groups, version: str) -> dict[str, Any]:
    """The OpenAPI document.

    Args:
        groups: routes under their headings.
        version: of Cardan.
    """
    schemas: dict[str, Any] = dict(ERRORS)
    paths: dict[str, Any] = {}
    for group, routes in groups.items():
        for route in routes:
            body = None if route.body is None else _add_body(route.body, group, schemas)
            for path in route.paths:
                item = paths.setdefault(_shown_path(path), {})
                for method in route.methods:
                    item[method.lower()] = _operation(route, group, (method, path), body)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Cardan", "version": version, "description": DESCRIPTION, "license": {"name": "Apache-2.0"}},
        "tags": [{"name": group} for group in groups],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        # With --api-key either of the two, without it neither.
        "security": [{"bearer": []}, {"key": []}, {}],
    }


def _shown_path(path: str) -> str:
    return re.sub(r":\w+}", "}", path)


def _add_body(body: type[Body], group: str, schemas: dict[str, Any]) -> str:
    """Put a body's schema among the others; returns its reference. Bodies of two APIs may share a name."""
    name = f"{group}{body.__name__.removeprefix(group)}"
    schema = body.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas |= schema.pop("$defs", {})
    schemas[name] = schema
    return f"#/components/schemas/{name}"


def _operation(route: ServedRoute, group: str, called: tuple[str, str], body: str | None) -> dict[str, Any]:
    method, path = called
    shown = _shown_path(path)
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{re.sub('[^A-Za-z0-9]+', '_', shown)}",
        "summary": route.summary.replace("`", ""),
        "tags": [group],
        "responses": _responses(route, method, shown),
    }
    places = [("path", name) for name in re.findall(r"{(\w+)", path)] + [("query", name) for name in route.query]
    if places:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for place, name in places
        ]
    if body is not None and method == "POST":
        content = {"application/json": {"schema": {"$ref": body}}}
        operation["requestBody"] = {"required": not route.body_optional, "content": content}
    if shown in OPEN_PATHS:
        operation["security"] = []
    return operation


def _responses(route: ServedRoute, method: str, shown: str) -> dict[str, Any]:
    path = _shown_path(route.paths[0])
    schema = ANSWERS.get(f"{method} {path}") or ANSWERS.get(path) or {"type": "string"}
    content: dict[str, Any] = {route.media_type: {"schema": schema}}
    others = (route.stream, route.other_media_type)
    content |= {other: {"schema": {"type": "string"}} for other in others if other is not None}
    error = {"$ref": f"#/components/schemas/{_ERROR_NAMES.get(form_of(shown), 'Error')}"}
    told = {"application/json": {"schema": error}}
    return {
        "200": {"description": "The answer.", "content": content},
        "4XX": {"description": "The request is wrong; the message says what to do.", "content": told},
        "5XX": {"description": "The server cannot answer now, or failed.", "content": told},
    }


_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}"
    "code{background:#8882;padding:0 .2em}table{border-collapse:collapse}td{padding:.1rem .8rem .1rem 0;"
    "vertical-align:top}summary{cursor:pointer}details{margin:.3rem 0}"
)


def build_page(groups: Groups, document: Mapping[str, Any]) -> str:
    """A page for people: every route with its fields. It loads nothing from elsewhere."""
    schemas: Mapping[str, Any] = document["components"]["schemas"]
    sections = []
    for group, routes in groups.items():
        entries = [_entry(route, group, schemas) for route in routes]
        sections.append(f"<h2>{html.escape(group)}</h2>\n" + "\n".join(entries))
    head = f"<title>Cardan</title><style>{_STYLE}</style>"
    intro = f'<h1>Cardan</h1><p>{html.escape(DESCRIPTION)} For programs: <a href="openapi.json">openapi.json</a>.</p>'
    body = "\n".join([intro, *sections])
    return f'<!doctype html><html lang="en"><head><meta charset="utf-8">{head}</head><body>{body}</body></html>'


def _entry(route: ServedRoute, group: str, schemas: Mapping[str, Any]) -> str:
    paths = " ".join(f"<code>{html.escape(_shown_path(path))}</code>" for path in route.paths)
    summary = re.sub("`(.*?)`", r"<code>\1</code>", html.escape(route.summary))
    line = f"{', '.join(route.methods)} {paths}: {summary}"
    if route.body is None:
        return f"<p>{line}</p>"
    schema = schemas[f"{group}{route.body.__name__.removeprefix(group)}"]
    rows = [_row(name, field, name in schema.get("required", ())) for name, field in schema["properties"].items()]
    return f"<details><summary>{line}</summary><table>{''.join(rows)}</table></details>"


def _row(name: str, field: Mapping[str, Any], required: bool) -> str:
    default = "" if field.get("default") is None else f"default {field['default']!r}"
    default = "required" if required else default
    cells = (f"<code>{html.escape(name)}</code>", html.escape(_kind(field)), html.escape(default))
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _kind(field: Mapping[str, Any]) -> str:
    options = [option for option in field.get("anyOf", ()) if option.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(_kind(option) for option in options))
    if "enum" in field or "const" in field:
        return " | ".join(str(value) for value in field.get("enum", [field.get("const")]))
    kind = str(field.get("type", "any"))
    if kind == "array":
        return f"array of {_kind(field.get('items', {}))}"
    return kind
