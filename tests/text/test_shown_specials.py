"""Special tokens that stay in a text although the others are left out."""

from __future__ import annotations

import pytest

from cardan.text import TextStream, Tokenizer, build_stop_checker
from cardan.types import FinishKind, SamplingParams


@pytest.mark.model
def test_only_the_named_ones_are_shown(smollm2: Tokenizer) -> None:
    start, end = smollm2.token_id("<|im_start|>"), smollm2.token_id("<|im_end|>")
    assert start is not None
    assert end is not None
    ids = [start, *smollm2.encode("word", add_special_tokens=False), end]
    for shown, text in (((), "word"), ((start,), "<|im_start|>word"), ((end, start), "<|im_start|>word<|im_end|>")):
        stream = TextStream(SamplingParams(shown_special_ids=shown), smollm2)
        assert stream.push(ids) == text


@pytest.mark.model
def test_stops_are_sought_in_what_is_shown(smollm2: Tokenizer) -> None:
    start = smollm2.token_id("<|im_start|>")
    assert start is not None
    ids = [*smollm2.encode("a", add_special_tokens=False), start, *smollm2.encode("b", add_special_tokens=False)]
    hidden = SamplingParams(stop=("start|>b",))
    shown = SamplingParams(stop=("start|>b",), shown_special_ids=(start,))
    assert build_stop_checker(hidden, (), smollm2).check(ids, len(ids)) is None
    reason = build_stop_checker(shown, (), smollm2).check(ids, len(ids))
    assert reason is not None
    assert reason.kind is FinishKind.STOP
