"""Names, in a header of the response, the schema keywords and the like that an output was not held to.

It knows no route. There is such a header where a request allowed that (schemas that are not strict), and where the
model decides to call functions that are ``strict`` and no grammar can hold such calls.
"""

from __future__ import annotations

from typing import TypeVar

from starlette.responses import Response

from cardan.grammar import unenforced_names
from cardan.server.generation import Job
from cardan.server.state import ServerState

HEADER = "X-Cardan-Unenforced"

ResponseT = TypeVar("ResponseT", bound=Response)


def name_unenforced(response: ResponseT, state: ServerState, job: Job) -> ResponseT:
    """The response, with the header where its job was not held to all that it asked for."""
    backend = state.engine.info.grammar_backend
    names = {name for one in job.requests for name in unenforced_names(one.sampling.grammar, backend)}
    names.update(job.unenforced)
    if names:
        response.headers[HEADER] = ", ".join(_plain(name) for name in sorted(names))
    return response


def _plain(name: str) -> str:
    """A keyword as a header can carry it: names of a caller's own may hold anything."""
    return "".join(char if char.isascii() and char.isprintable() and char != "," else "?" for char in name)
