"""A request that is refused after it was taken in: its own message counts, whichever of two messages comes first."""

from __future__ import annotations

import asyncio

import pytest

from cardan.engine.api import GenerateRequest
from cardan.engine.messages import Details, TextNews
from cardan.engine.open_requests import OpenRequests
from cardan.errors import RequestError
from cardan.types import FinishKind, FinishReason


@pytest.mark.parametrize("news_first", [True, False])
def test_the_refusal_is_what_the_caller_hears(news_first: bool) -> None:
    async def run() -> None:
        requests = OpenRequests()
        opened, (message,) = requests.open(GenerateRequest(input_ids=(1,)), (1,), 0.0)
        finish = FinishReason(FinishKind.ERROR, message="type must be a string", refused=True)
        details = Details(finish=finish, prompt_tokens=1, cached_tokens=0, num_retractions=0, queue_s=0.0)
        tell = [
            lambda: requests.deliver(TextNews(message.wire_id, "", (), details)),
            lambda: requests.reject(message.wire_id, RequestError("type must be a string", param="response_format")),
        ]
        for one in tell if news_first else reversed(tell):
            one()
        with pytest.raises(RequestError, match="type must be a string"):
            await opened.pending.take()

    asyncio.run(run())
