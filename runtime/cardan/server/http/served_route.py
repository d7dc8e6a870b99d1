"""One route as data, and how it becomes one of the application's.

It knows no route in particular; ``routes`` lists them all.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cardan.errors import RequestError
from cardan.server.http.bodies import Body, shorten

Endpoint = Callable[[Request], Awaitable[Response]]

EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedRoute:
    """One route.

    Attributes:
        paths: its path, and other names of it.
        methods: HTTP methods.
        endpoint: answers.
        summary: what it does, in a few words that go on after the path.
        body: of a POST, or None.
        body_optional: whether a request without a body counts as one whose body is empty.
        query: query parameters that are taken (others get a 400).
        stream: media type of the answer where the body says ``stream``.
        media_type: of the answer otherwise.
        other_media_type: another media type of the answer, for those who accept no other.
    """

    paths: tuple[str, ...]
    methods: tuple[str, ...]
    endpoint: Endpoint
    summary: str
    body: type[Body] | None = None
    body_optional: bool = False
    query: tuple[str, ...] = ()
    stream: str | None = None
    media_type: str = "application/json"
    other_media_type: str | None = None

    def build(self) -> Iterator[Route]:
        """The application's routes."""

        async def checked(request: Request) -> Response:
            for name in request.query_params:
                if name not in self.query:
                    taken = f"takes only {', '.join(self.query)} as" if self.query else "takes no"
                    raise RequestError(
                        f"This route {taken} query parameters, got '{shorten(name)}'.",
                        param=shorten(name),
                        code="unknown_parameter",
                    )
            return await self.endpoint(request)

        for path in self.paths:
            yield Route(path, checked, methods=list(self.methods))


def served_get(
    *paths: str,
    endpoint: Endpoint,
    summary: str,
    media_type: str = "application/json",
    other_media_type: str | None = None,
    query: tuple[str, ...] = (),
) -> ServedRoute:
    """A route that is only read."""
    return ServedRoute(
        paths=paths,
        methods=("GET",),
        endpoint=endpoint,
        summary=summary,
        media_type=media_type,
        other_media_type=other_media_type,
        query=query,
    )


def served_post(
    *paths: str,
    endpoint: Endpoint,
    summary: str,
    body: type[Body],
    body_optional: bool = False,
    stream: str | None = None,
) -> ServedRoute:
    """A route that takes a body."""
    return ServedRoute(
        paths=paths,
        methods=("POST",),
        endpoint=endpoint,
        summary=summary,
        body=body,
        body_optional=body_optional,
        stream=stream,
    )
