"""Native calls with one prompt or many become one request per prompt, or are refused."""

from __future__ import annotations

import pytest

from cardan.engine.native_request import native_call
from cardan.errors import RequestError
from cardan.types import LogprobParams, SamplingParams


def test_one_prompt():
    call = native_call("hi", {"top_k": 3}, {"rid": "a", "priority": 2, "cache_salt": None})
    (request,) = call.requests
    assert (request.text, request.rid, request.priority, request.cache_salt) == ("hi", "a", 2, None)
    assert request.sampling == SamplingParams(top_k=3)
    assert not call.many


def test_one_prompt_of_ids():
    (request,) = native_call(None, SamplingParams(n=2), {"input_ids": [1, 2]}).requests
    assert request.input_ids == (1, 2)
    assert native_call(None, SamplingParams(n=2), {"input_ids": [1, 2]}).many


def test_many_prompts_share_or_have_their_own():
    call = native_call(
        ["a", "b"],
        [{"top_k": 1}, SamplingParams(top_k=2)],
        {"rid": ["x", "y"], "return_logprob": True, "top_logprobs_num": [1, 2], "token_ids_logprob": [5, 6]},
    )
    assert [request.text for request in call.requests] == ["a", "b"]
    assert [request.sampling.top_k for request in call.requests] == [1, 2]
    assert [request.rid for request in call.requests] == ["x", "y"]
    assert [request.logprobs for request in call.requests] == [
        LogprobParams(output=True, top=1, token_ids=(5, 6)),
        LogprobParams(output=True, top=2, token_ids=(5, 6)),
    ]
    assert call.many


def test_defaults_of_the_model_stand_for_what_is_not_stated():
    defaults = {"temperature": 0.6, "top_k": 20}
    stated = [None, {"temperature": 0}, {"top_k": None, "top_p": 0.5}, SamplingParams()]
    call = native_call(["a", "b", "c", "d"], stated, {}, defaults)
    assert [request.sampling for request in call.requests] == [
        SamplingParams(temperature=0.6, top_k=20),
        SamplingParams(temperature=0.0, top_k=20),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.5),
        SamplingParams(),
    ]


def test_lists_of_ids_for_each_prompt():
    call = native_call(None, None, {"input_ids": [[1], [2, 3]], "return_logprob": True, "token_ids_logprob": [[5], []]})
    assert [request.input_ids for request in call.requests] == [(1,), (2, 3)]
    assert [request.logprobs.token_ids for request in call.requests] == [(5,), ()]


@pytest.mark.parametrize(
    ("prompt", "sampling", "options", "message"),
    [
        (None, None, {}, "one of a text, input_ids and input_embeds, got none of them"),
        ("a", None, {"input_ids": [1]}, "got a text and input_ids"),
        ([], None, {}, "list of at least one text"),
        (["a", 1], None, {}, "list of at least one text"),
        (None, None, {"input_ids": []}, "input_ids must be a list"),
        (None, None, {"input_ids": "12"}, "input_ids must be a list"),
        ("a", None, {"rids": "x"}, "Did you mean 'rid'"),
        ("a", None, {"q": 1}, "Known: input_ids"),
        ("a", [{}], {}, "sampling_params is a list, but there is one prompt"),
        (["a", "b"], [{}], {}, "sampling_params has 1 entries for 2 prompts"),
        (["a", "b"], None, {"rid": "x"}, "rid must be a list with one id per prompt"),
        ("a", None, {"priority": "high"}, "priority must be of type int, got 'high'"),
        ("a", None, {"priority": True}, "priority must be of type int, got True"),
        ("a", None, {"return_logprob": 1}, "return_logprob must be of type bool"),
    ],
)
def test_wrong_calls_are_refused(prompt, sampling, options, message):
    with pytest.raises(RequestError) as caught:
        native_call(prompt, sampling, options)
    assert message in str(caught.value)


@pytest.mark.parametrize("count", [0, -1, 129, 10**9, 10**400])
@pytest.mark.parametrize("wrap", [dict, lambda n: SamplingParams(n=n)], ids=["dict", "params"])
def test_choices_are_counted_before_anything_is_made_for_them(wrap, count):
    """Whoever holds a call makes room for each of its choices, so a wrong number must not get that far."""
    with pytest.raises(RequestError) as caught:
        native_call(["a", "b"], [{}, wrap(n=count)], {})
    assert caught.value.param == "n"
