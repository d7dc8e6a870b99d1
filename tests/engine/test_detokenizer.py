"""Text of open choices: what goes out when, and what is forgotten."""

from __future__ import annotations

import pytest
import zmq

from cardan.engine.channels import DETOKENIZER_INBOX, FRONTEND_INBOX, Outbox, open_inbox
from cardan.engine.detokenizer import Detokenizer
from cardan.engine.detokenizer_process import _serve
from cardan.engine.messages import (
    FRONTEND_DECODER,
    Details,
    OpenStream,
    Shutdown,
    TokenBatch,
    TokenNews,
    encode,
)
from cardan.engine.model_files import load_model_tokenizer
from cardan.types import FinishKind, FinishReason, SamplingParams, TokenLogprobs


@pytest.fixture(scope="module")
def tokenizer(null_config):
    return load_model_tokenizer(null_config().model)


def details(finish=None, **fields) -> Details:
    values = {"prompt_tokens": 1, "cached_tokens": 0, "num_retractions": 0, "queue_s": 0.0}
    return Details(finish=finish, **{**values, **fields})


def plain(wire_id: str, token: int) -> TokenBatch:
    return TokenBatch([wire_id], [token], [])


def ended(wire_id: str, *tokens: int, reason=None) -> TokenBatch:
    return TokenBatch([], [], [TokenNews(wire_id, list(tokens), details(reason or FinishReason(FinishKind.LENGTH)))])


def opened(tokenizer, interval=1, **sampling) -> Detokenizer:
    detokenizer = Detokenizer(tokenizer, interval)
    detokenizer.open(OpenStream("a", SamplingParams(**sampling)))
    return detokenizer


def take(detokenizer, batch):
    detokenizer.take(batch)
    flushed = detokenizer.flush()
    return None if flushed is None else [(news.text, list(news.token_ids)) for news in flushed.news]


def test_each_token_goes_out_at_once(tokenizer):
    detokenizer = opened(tokenizer)
    assert take(detokenizer, plain("a", ord("h"))) == [("h", [ord("h")])]
    assert take(detokenizer, plain("a", ord("i"))) == [("i", [ord("i")])]


def test_bytes_wait_until_they_are_a_character(tokenizer):
    detokenizer = opened(tokenizer)
    first, second = "é".encode()
    assert take(detokenizer, plain("a", first)) == [("", [first])]
    assert take(detokenizer, plain("a", second)) == [("é", [second])]


def test_stream_interval_batches_all_but_the_first_and_the_end(tokenizer):
    detokenizer = opened(tokenizer, interval=3)
    assert take(detokenizer, plain("a", ord("a"))) == [("a", [ord("a")])]
    assert take(detokenizer, plain("a", ord("b"))) is None
    assert take(detokenizer, plain("a", ord("c"))) is None
    assert take(detokenizer, plain("a", ord("d"))) == [("bcd", [98, 99, 100])]
    assert take(detokenizer, plain("a", ord("e"))) is None
    assert take(detokenizer, ended("a", ord("f"))) == [("ef", [101, 102])]


def test_a_stop_string_is_trimmed_and_never_leaks(tokenizer):
    detokenizer = opened(tokenizer, stop=("END",))
    texts = [take(detokenizer, plain("a", ord(letter)))[0][0] for letter in "xEN"]
    last = take(detokenizer, ended("a", ord("D"), reason=FinishReason(FinishKind.STOP, matched="END")))
    assert (texts, last) == (["x", "", ""], [("", [ord("D")])])


def test_what_was_held_back_goes_out_at_the_end(tokenizer):
    detokenizer = opened(tokenizer, stop=("END",))
    assert take(detokenizer, plain("a", ord("E"))) == [("", [ord("E")])]
    assert take(detokenizer, ended("a")) == [("E", [])]


def test_merged_news_keep_all_logprobs_and_the_latest_totals(tokenizer):
    detokenizer = opened(tokenizer, interval=10)
    one, two = TokenLogprobs(logprob=-1.0), TokenLogprobs(logprob=-2.0)
    first = details(logprobs=(one,), prompt_logprobs=(None,))
    last = details(FinishReason(FinishKind.LENGTH), logprobs=(two,), num_retractions=3)
    detokenizer.take(TokenBatch([], [], [TokenNews("a", [104], first)]))
    detokenizer.take(TokenBatch([], [], [TokenNews("a", [105], last)]))
    (news,) = detokenizer.flush().news
    assert news.text == "hi"
    assert news.details.logprobs == (one, two)
    assert news.details.prompt_logprobs == (None,)
    assert news.details.num_retractions == 3
    assert news.details.finish is not None


def test_a_choice_that_ended_is_forgotten(tokenizer):
    detokenizer = opened(tokenizer)
    detokenizer.open(OpenStream("b", SamplingParams()))
    take(detokenizer, ended("a", 104))
    assert len(detokenizer) == 1
    take(detokenizer, ended("b", reason=FinishReason(FinishKind.ABORT, message="gone")))
    assert len(detokenizer) == 0
    assert detokenizer.flush() is None


def test_no_message_of_a_backlog_is_lost(tokenizer, tmp_path):
    count = 300
    with zmq.Context() as context:
        inbox = open_inbox(context, tmp_path, DETOKENIZER_INBOX)
        answers = open_inbox(context, tmp_path, FRONTEND_INBOX)
        feed = Outbox(context, tmp_path, DETOKENIZER_INBOX)
        out = Outbox(context, tmp_path, FRONTEND_INBOX)
        for index in range(count):
            feed.send(encode(OpenStream(f"r{index}", SamplingParams())))
            feed.send(encode(ended(f"r{index}", 65)))
        feed.send(encode(Shutdown()))
        _serve(Detokenizer(tokenizer, 1), inbox, out)
        seen = []
        while answers.poll(500):
            seen += [news.wire_id for news in FRONTEND_DECODER.decode(answers.recv()).news]
        for socket in (inbox, answers, feed, out):
            socket.close()
    assert seen[: count - 64] == [f"r{index}" for index in range(count)][: count - 64]
    assert len(seen) >= count - 64, "news that were merged with the end of the process are not sent any more"
