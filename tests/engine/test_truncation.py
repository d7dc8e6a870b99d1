"""With ``--allow-auto-truncate`` a prompt that is too long is cut, and the answer says so."""

from __future__ import annotations

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
