"""Sampling parameters from plain values, and answers in the native form."""

from __future__ import annotations

import pytest

from cardan.engine.api import GenerateOutput, RequestTimes
from cardan.engine.native import NativeOutput, finish_reason_dict, logprob_params, native_output, sampling_from_dict
from cardan.errors import RequestError
from cardan.types import FinishKind, FinishReason, LogprobParams, SamplingParams, TokenLogprobs


def test_missing_and_null_keys_take_the_default():
    assert sampling_from_dict(None) == SamplingParams()
    assert sampling_from_dict({"temperature": None, "top_k": 5}) == SamplingParams(top_k=5)


def test_one_or_many_and_keys_from_json():
    params = sampling_from_dict(
        {"stop": "a", "stop_regex": ["b", "c"], "stop_token_ids": 7, "logit_bias": {"3": 1, 4: -2.5}, "temperature": 0}
    )
    assert params == SamplingParams(
        stop=("a",), stop_regex=("b", "c"), stop_token_ids=(7,), logit_bias={3: 1.0, 4: -2.5}, temperature=0
    )


@pytest.mark.parametrize(
    ("values", "param", "message"),
    [
        ({"temprature": 1}, "temprature", "Did you mean 'temperature'?"),
        ({"zzz": 1}, "zzz", "'zzz' is not a sampling parameter. Known: max_new_tokens"),
        ({"temperature": "hot"}, "temperature", "temperature is wrong: Expected `float`, got `str`"),
        ({"max_new_tokens": 1.5}, "max_new_tokens", "max_new_tokens is wrong"),
        ({"max_new_tokens": True}, "max_new_tokens", "max_new_tokens is wrong"),
        ({"stop": [1]}, "stop", "stop is wrong"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias has the key 'x', expected a token id"),
        *(
            ({"logit_bias": {"1": 2, wrong: 3}}, "logit_bias", f"has the key {wrong!r}, expected a token id")
            for wrong in ("01", " 1", "1 ", "+1", "1_0", "\u0661", "1.0", "-1", "")
        ),
        ({"logit_bias": {"1": 2, 1: 3}}, "logit_bias", "names a token twice"),
        ({"logit_bias": {str(i): "no" for i in range(1025)}}, "logit_bias", "may have at most 1024 entries, got 1025"),
        ({"stop_token_ids": ["no"] * 1025}, "stop_token_ids", "may have at most 1024 entries, got 1025"),
        ({"stop": [1] * 65}, "stop", "may have at most 64 entries, got 65"),
        ({"ignore_eos": 1}, "ignore_eos", "ignore_eos is wrong"),
    ],
)
def test_wrong_values_name_their_field(values, param, message):
    with pytest.raises(RequestError) as caught:
        sampling_from_dict(values)
    assert caught.value.param == param
    assert message in str(caught.value)


def test_sampling_params_must_be_an_object():
    with pytest.raises(RequestError, match="sampling_params must be an object, got list"):
        sampling_from_dict([1])


def test_logprob_fields():
    assert logprob_params() == LogprobParams()
    assert logprob_params(True) == LogprobParams(output=True)
    assert logprob_params(True, 0, 2, [5]) == LogprobParams(output=True, prompt_start=0, top=2, token_ids=(5,))
    assert logprob_params(True, -1).prompt_start is None


@pytest.mark.parametrize("name", ["logprob_start_len", "top_logprobs_num", "token_ids_logprob"])
def test_logprob_fields_without_effect_are_refused(name):
    value = [1] if name == "token_ids_logprob" else 1
    with pytest.raises(RequestError, match=f"{name} needs return_logprob") as caught:
        logprob_params(False, **{name: value})
    assert caught.value.param == name


def test_a_start_below_minus_one_is_refused():
    with pytest.raises(RequestError, match="must be -1 or a position, got -2"):
        logprob_params(True, -2)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        (None, None),
        (FinishReason(FinishKind.STOP, matched=5), {"type": "stop", "matched": 5}),
        (FinishReason(FinishKind.STOP, matched="x"), {"type": "stop", "matched": "x"}),
        (FinishReason(FinishKind.LENGTH, length=3), {"type": "length", "length": 3}),
        (FinishReason(FinishKind.ABORT, message="gone"), {"type": "abort", "message": "gone"}),
        (FinishReason(FinishKind.ERROR, message="NaN"), {"type": "error", "message": "NaN"}),
        (
            FinishReason(FinishKind.ERROR, message="no", code="no_token_allowed"),
            {"type": "error", "message": "no", "code": "no_token_allowed"},
        ),
    ],
)
def test_finish_reasons(reason, expected):
    assert finish_reason_dict(reason) == expected


def test_news_add_up():
    news = [
        GenerateOutput(rid="a", text="He", token_ids=(1, 2), prompt_tokens=4, cached_tokens=3, completion_tokens=2),
        GenerateOutput(
            rid="a",
            text="y",
            token_ids=(3,),
            prompt_tokens=4,
            completion_tokens=3,
            cached_tokens=3,
            num_retractions=1,
            finish_reason=FinishReason(FinishKind.LENGTH, length=3),
            max_new_tokens_clamped=3,
            times=RequestTimes(queue_s=0.1, first_token_s=0.2, e2e_s=0.3),
        ),
    ]
    assert native_output(news) == {
        "text": "Hey",
        "output_ids": [1, 2, 3],
        "meta_info": {
            "id": "a",
            "finish_reason": {"type": "length", "length": 3},
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "cached_tokens": 3,
            "num_retractions": 1,
            "queue_time": 0.1,
            "first_token_latency": 0.2,
            "e2e_latency": 0.3,
            "max_new_tokens_clamped": 3,
        },
    }


def test_logprobs_stand_beside_their_tokens():
    first = TokenLogprobs(logprob=-0.5, top=((7, -0.5), (8, -1.0)), chosen=((9, -4.0),))
    news = [
        GenerateOutput(
            rid="a",
            token_ids=(7,),
            logprobs=(first,),
            prompt_logprobs=(None, TokenLogprobs(logprob=-2.0, top=((5, -2.0),), chosen=((9, -3.0),))),
            prompt_token_ids=(4, 5),
        )
    ]
    wanted = LogprobParams(output=True, prompt_start=0, top=2, token_ids=(9,))
    meta = native_output(news, wanted, lambda token: f"<{token}>")["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 7, "<7>"]]
    assert meta["output_top_logprobs"] == [[[-0.5, 7, "<7>"], [-1.0, 8, "<8>"]]]
    assert meta["output_token_ids_logprobs"] == [[[-4.0, 9, "<9>"]]]
    assert meta["input_token_logprobs"] == [[None, 4, "<4>"], [-2.0, 5, "<5>"]]
    assert meta["input_top_logprobs"] == [None, [[-2.0, 5, "<5>"]]]
    assert meta["input_token_ids_logprobs"] == [None, [[-3.0, 9, "<9>"]]]


def test_text_of_logprobs_only_on_demand():
    news = [GenerateOutput(rid="a", token_ids=(7,), logprobs=(TokenLogprobs(logprob=-0.5),))]
    meta = native_output(news, LogprobParams(output=True))["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, 7, None]]
    assert meta["input_token_logprobs"] == []
    assert "output_top_logprobs" not in meta


def test_finished_and_the_answer_so_far():
    output = NativeOutput()
    assert output.as_dict()["text"] == ""
    output.add(GenerateOutput(rid="a", text="x", token_ids=(1,)))
    assert not output.finished
    assert output.as_dict()["text"] == "x"
    output.add(GenerateOutput(rid="a", text="y", finish_reason=FinishReason(FinishKind.ABORT)))
    assert output.finished
    assert output.as_dict()["text"] == "xy"
