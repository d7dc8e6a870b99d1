"""What is refused before it leaves the frontend, with the field at fault."""

from __future__ import annotations

import math

import pytest

from cardan.engine.api import GenerateRequest
from cardan.engine.messages import FeatureAnswer
from cardan.engine.validation import RequestLimits, check_prompt, check_request
from cardan.errors import RequestError
from cardan.types import LogprobParams, SamplingParams

LIMITS = RequestLimits(vocab_size=100, platform="null")
NAN = math.nan


def check(sampling=None, logprobs=None, limits=LIMITS, **fields):
    request = GenerateRequest(
        text="x", sampling=SamplingParams(**(sampling or {})), logprobs=LogprobParams(**(logprobs or {})), **fields
    )
    check_request(request, limits)


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0},
        {"temperature": 100.0, "top_p": 1e-9, "min_p": 1.0, "repetition_penalty": 2.0, "top_k": 2**31 - 1},
        {"frequency_penalty": -2.0, "presence_penalty": 2.0, "seed": 2**64 - 1, "n": 128},
        {"seed": -(2**63), "logit_bias": {99: -math.inf, 0: 100.0}},
        {"max_new_tokens": 0},
        {"stop": ("a",) * 64, "stop_regex": ("a+",), "stop_token_ids": (0, 99)},
    ],
)
def test_values_within_range_pass(sampling):
    check(sampling)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("temperature", value) for value in (-0.1, 100.1, NAN, math.inf, "hot", True, None)],
        *[("top_p", value) for value in (0.0, 1.1, -1.0, NAN)],
        *[("min_p", value) for value in (-0.1, 1.1, NAN)],
        *[("frequency_penalty", value) for value in (-2.1, 2.1, NAN)],
        *[("presence_penalty", value) for value in (-2.1, 2.1, NAN)],
        *[("repetition_penalty", value) for value in (0.0, -1.0, 2.1, NAN)],
        *[("top_k", value) for value in (0, -2, 1.5, 2**31)],
        *[("max_new_tokens", value) for value in (-1, 2**31, 1.5, True)],
        *[("min_new_tokens", value) for value in (-1, 129)],
        *[("n", value) for value in (0, -1, 129)],
        *[("seed", value) for value in (2**64, -(2**63) - 1, 0.5)],
        *[("logit_bias", value) for value in ({100: 1.0}, {-1: 1.0}, {5: NAN}, {5: math.inf}, {5: "x"})],
        *[(name, sign * 10**400) for name in ("temperature", "top_k", "seed", "n", "top_p") for sign in (1, -1)],
        pytest.param("stop_token_ids", (10**5000,), id="stop-ids-huge"),
        pytest.param("seed", 10**5000, id="seed-huge"),
        ("logit_bias", {5: 10**400}),
        pytest.param("logit_bias", {10**5000: 1.0}, id="bias-huge"),
        *[("stop", value) for value in (("",), ("a",) * 65, ("a" * 1025,), (5,))],
        *[("stop_regex", value) for value in (("(",), ("",), (r"(?=a)",))],
        *[("stop_token_ids", value) for value in ((100,), (-1,), (True,))],
        pytest.param("stop_token_ids", (1,) * 1025, id="stop-ids-many"),
        pytest.param("logit_bias", dict.fromkeys(range(1025), 0.0), id="bias-many"),
    ],
)
def test_values_out_of_range_name_their_field(name, value):
    with pytest.raises(RequestError) as caught:
        check({name: value})
    assert caught.value.param == name
    assert name in str(caught.value)


@pytest.mark.parametrize(
    ("logprobs", "param"),
    [
        ({"output": True, "top": -1}, "top_logprobs_num"),
        ({"output": True, "top": 101}, "top_logprobs_num"),
        ({"output": True, "token_ids": (100,)}, "token_ids_logprob"),
        ({"output": True, "token_ids": (1,) * 129}, "token_ids_logprob"),
        ({"output": True, "prompt_start": -1}, "logprob_start_len"),
    ],
)
def test_logprob_fields_out_of_range(logprobs, param):
    with pytest.raises(RequestError) as caught:
        check(logprobs=logprobs)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (GenerateRequest(), "one of text, input_ids and input_embeds, got none of them"),
        (GenerateRequest(text="", input_ids=()), "got text and input_ids"),
        (GenerateRequest(text="x", rid=""), "rid must have between 1 and 256 characters, got 0"),
        (GenerateRequest(text="x", rid="a" * 257), "got 257"),
        (GenerateRequest(text="x", priority=2**31), "priority must be a 32-bit whole number"),
        (GenerateRequest(text="x", cache_salt="a" * 1025), "cache_salt may have at most 1024 characters, got 1025"),
        (GenerateRequest(text="x", routing_key="a" * 1025), "routing_key may have at most 1024 characters, got 1025"),
    ],
)
def test_wrong_requests(request_, message):
    with pytest.raises(RequestError) as caught:
        check_request(request_, LIMITS)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((), "The prompt has no tokens"),
        ((100,), "input_ids holds 100, expected token ids between 0 and 99"),
        ((-1,), "holds -1"),
        ((1.5,), "holds 1.5"),
        ((True,), "holds True"),
    ],
)
def test_wrong_prompts(ids, message):
    with pytest.raises(RequestError) as caught:
        check_prompt(GenerateRequest(input_ids=ids), ids, LIMITS)
    assert message in str(caught.value)
    assert caught.value.param == "input_ids"


def test_prompt_logprobs_must_start_within_the_prompt():
    request = GenerateRequest(text="x", logprobs=LogprobParams(output=True, prompt_start=3))
    check_prompt(request, (1, 2, 3), LIMITS)
    with pytest.raises(RequestError, match="from position 3, but the prompt has 2 tokens"):
        check_prompt(request, (1, 2), LIMITS)


@pytest.mark.parametrize(
    ("feature", "fields", "param"),
    [
        ("sampling", {"sampling": {"temperature": 0.5}}, "temperature"),
        ("penalties", {"sampling": {"temperature": 0, "presence_penalty": 0.5}}, "presence_penalty"),
        ("penalties", {"sampling": {"temperature": 0, "repetition_penalty": 1.1}}, "repetition_penalty"),
        ("logit_bias", {"sampling": {"temperature": 0, "logit_bias": {1: 1.0}}}, "logit_bias"),
        ("logit_bias", {"sampling": {"temperature": 0, "min_new_tokens": 1}}, "min_new_tokens"),
        ("logprobs", {"sampling": {"temperature": 0}, "logprobs": {"output": True}}, "return_logprob"),
        ("prompt_logprobs", {"sampling": {"temperature": 0}, "logprobs": {"prompt_start": 0}}, "logprob_start_len"),
    ],
)
def test_what_the_platform_lacks_is_refused_with_its_reason(feature, fields, param):
    lacking = {feature: FeatureAnswer("no kernel for it", "Use platform 'cpu'.")}
    limits = RequestLimits(vocab_size=100, platform="slow", lacking=lacking)
    with pytest.raises(RequestError) as caught:
        check(limits=limits, **fields)
    assert caught.value.param == param
    assert caught.value.code == "unsupported_on_platform"
    assert "platform 'slow' does not support: no kernel for it. Use platform 'cpu'." in str(caught.value)
    check({"temperature": 0}, limits=limits)


def test_sampling_of_one_candidate_needs_no_sampling():
    limits = RequestLimits(vocab_size=100, platform="slow", lacking={"sampling": FeatureAnswer("no", "")})
    check({"temperature": 1.0, "top_k": 1}, limits=limits)
