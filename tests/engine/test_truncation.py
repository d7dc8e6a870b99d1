"""With ``--allow-auto-truncate`` a prompt that is too long is cut, and the answer says so."""

from __future__ import annotations

import pytest

from cardan.engine.messages import Generate
from cardan.testing.null_tokens import expected_tokens
from cardan.types import SamplingParams


def test_a_cut_prompt_is_told_and_its_logprobs_are_of_what_was_kept(start_engine, vocabulary):
    engine = start_engine(allow_auto_truncate=True, max_total_tokens=60).engine
    prompt = [index % 200 for index in range(100)]
    kept = prompt[: 60 - 1 - 5]
    sampling = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True}
    answer = engine.generate(
        input_ids=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=50, top_logprobs_num=1
    )
    meta = answer["meta_info"]
    assert (meta["prompt_truncated_from"], meta["prompt_tokens"]) == (100, len(kept))
    assert answer["output_ids"] == expected_tokens(kept, SamplingParams(**sampling), vocabulary)
    assert [token for _, token, _ in meta["input_token_logprobs"]] == kept[50:]
    short = engine.generate(input_ids=prompt[:8], sampling_params=sampling)
    assert "prompt_truncated_from" not in short["meta_info"]


@pytest.mark.parametrize("as_text", [False, True])
def test_what_is_cut_off_is_neither_looked_at_nor_sent_on(start_engine, vocabulary, monkeypatch, as_text):
    """A prompt of millions of tokens would hold up the event loop and the scheduler."""
    started = start_engine(allow_auto_truncate=True, max_total_tokens=60)
    frontend, sent = started.frontend, []
    send = frontend._send

    def watch(message):
        sent.append(message)
        send(message)

    monkeypatch.setattr(frontend, "_send", watch)
    text = "the quick brown fox " * 20_000
    ids = started.engine.tokenizer.encode(text) if as_text else [*range(54), *([10**9] * 500_000)]
    sampling = {"max_new_tokens": 3, "temperature": 0.0, "ignore_eos": True, "n": 2}
    prompt = {"prompt": text} if as_text else {"input_ids": ids}
    answers = started.engine.generate(**prompt, sampling_params=sampling)
    assert [answer["meta_info"]["prompt_truncated_from"] for answer in answers] == [len(ids)] * 2
    messages = [message for message in sent if isinstance(message, Generate)]
    assert [(message.prompt_ids, message.truncated_from) for message in messages] == [(ids[:54], len(ids))] * 2
    kept = SamplingParams(max_new_tokens=3, temperature=0.0, ignore_eos=True)
    assert answers[0]["output_ids"] == expected_tokens(ids[:54], kept, vocabulary)
