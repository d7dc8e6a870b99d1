"""``/v1/score`` against the logprobs of ``/generate``, on every kind of engine."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest

LABELS = [65, 66, 67]


def score(client: httpx.Client, **body: Any) -> Any:
    response = client.post("/v1/score", json={"label_token_ids": LABELS, **body})
    assert response.status_code == 200, response.text
    return response.json()


def probabilities(client: httpx.Client, **prompt: Any) -> list[float]:
    body = {
        **prompt,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
        "return_logprob": True,
        "token_ids_logprob": LABELS,
    }
    entries = client.post("/generate", json=body).json()["meta_info"]["output_token_ids_logprobs"][0]
    assert [entry[1] for entry in entries] == LABELS
    return [math.exp(entry[0]) for entry in entries]


def test_texts(client: httpx.Client) -> None:
    items = [" yes", " no", " maybe"]
    told = score(client, query="Is it so?", items=items)
    assert told["object"] == "scoring"
    for item, scores in zip(items, told["scores"], strict=True):
        assert scores == pytest.approx(probabilities(client, text="Is it so?" + item))
    prompts = [client.post("/tokenize", json={"text": "Is it so?" + item}).json()["count"] for item in items]
    assert told["usage"]["prompt_tokens"] == sum(prompts)
    (alone,) = score(client, query="Is it so?", items=" no")["scores"]
    assert alone == pytest.approx(told["scores"][1])


def test_token_ids_and_items_first(client: httpx.Client) -> None:
    told = score(client, query=[72, 73], items=[[80], [81, 82]], item_first=True)
    expected = [probabilities(client, input_ids=ids) for ids in ([80, 72, 73], [81, 82, 72, 73])]
    for scores, wanted in zip(told["scores"], expected, strict=True):
        assert scores == pytest.approx(wanted)


def test_among_the_labels_alone(client: httpx.Client) -> None:
    (plain,) = score(client, query="So", items=" x")["scores"]
    (relative,) = score(client, query="So", items=" x", apply_softmax=True)["scores"]
    assert sum(relative) == pytest.approx(1)
    assert relative == pytest.approx([value / sum(plain) for value in plain])


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"query": None}, "query", "is required"),
    ({"items": []}, "items", "1 to 1024 items, got 0"),
    ({"items": ["x"] * 1025}, "items", "got 1025"),
    ({"items": [[65]]}, "items", "of one kind"),
    ({"query": [65]}, "items", "of one kind"),
    ({"query": [65], "items": [[10**7]]}, "items", "ids of this model"),
    ({"label_token_ids": []}, "label_token_ids", "at least 1"),
    ({"label_token_ids": [10**7]}, "label_token_ids", "ids of this model"),
    ({"label_token_ids": [65, 65]}, "label_token_ids", "holds an id twice"),
    ({"label_token_ids": list(range(129))}, "label_token_ids", "at most 128"),
    ({"temperature": 1}, "temperature", "Unknown field"),
]


@pytest.mark.parametrize(("fields", "param", "message"), BAD, ids=[f"{i}-{bad[1]}" for i, bad in enumerate(BAD)])
def test_bad_requests_are_named(client: httpx.Client, fields: dict[str, Any], param: str, message: str) -> None:
    response = client.post("/v1/score", json={"query": "x", "items": "y", "label_token_ids": LABELS, **fields})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].startswith(param)
    assert message in error["message"]
