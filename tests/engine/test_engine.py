"""The offline API: answers as dicts, one or many, whole or streamed, from threads and from event loops."""

from __future__ import annotations

import asyncio
import threading

import pytest

import cardan
from cardan.config import EngineConfig
from cardan.engine import Engine
from cardan.errors import ConfigError, EngineDeadError, RequestError
from cardan.testing.null_tokens import expected_tokens
from cardan.types import SamplingParams

GREEDY = {"temperature": 0, "max_new_tokens": 6}


@pytest.fixture
def offline(engine) -> Engine:
    return engine.engine


def alone(vocabulary, prompt: str, **params) -> list[int]:
    return expected_tokens(list(prompt.encode()), SamplingParams(**{**GREEDY, **params}), vocabulary)


def test_the_package_exports_it():
    assert cardan.Engine is Engine


def test_one_prompt_gives_one_dict(offline, vocabulary):
    answer = offline.generate("hello", GREEDY)
    assert answer["output_ids"] == alone(vocabulary, "hello")
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
    assert {"id", "cached_tokens", "queue_time", "first_token_latency", "e2e_latency", "num_retractions"} <= set(meta)
    assert offline.generate(input_ids=list(b"hello"), sampling_params=GREEDY)["text"] == answer["text"]


def test_many_prompts_give_a_list_in_their_order(offline, vocabulary):
    prompts = [f"prompt {index}" for index in range(30)]
    answers = offline.generate(prompts, [{**GREEDY, "max_new_tokens": 1 + index} for index in range(30)])
    for index, answer in enumerate(answers):
        assert answer["output_ids"] == alone(vocabulary, prompts[index], max_new_tokens=1 + index)


def test_n_choices_give_a_list(offline):
    answers = offline.generate("hello", {"n": 3, "seed": 5, "max_new_tokens": 4})
    assert len({tuple(answer["output_ids"]) for answer in answers}) == 3
    assert len(offline.generate(["a", "b"], {"n": 2, "max_new_tokens": 1})) == 4


def test_logprobs_as_asked(offline):
    meta = offline.generate(
        "hey",
        GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        token_ids_logprob=[1],
        return_text_in_logprobs=True,
    )["meta_info"]
    assert [entry[1:] for entry in meta["input_token_logprobs"]] == [[ord(letter), letter] for letter in "hey"]
    assert meta["input_token_logprobs"][0][0] is None
    assert len(meta["output_token_logprobs"]) == 6
    assert all(len(entry) == 2 for entry in meta["output_top_logprobs"])
    assert all(entry[0][1] == 1 for entry in meta["output_token_ids_logprobs"])
    assert len(meta["input_top_logprobs"]) == len(meta["input_token_ids_logprobs"]) == 3


def test_a_stream_gives_the_answer_so_far(offline):
    whole = offline.generate("hello", GREEDY)
    parts = list(offline.generate("hello", GREEDY, stream=True))
    lengths = [len(part["output_ids"]) for part in parts]
    assert lengths == sorted(set(lengths)), "each part has more than the one before"
    assert all(part["output_ids"] == whole["output_ids"][:length] for part, length in zip(parts, lengths, strict=True))
    assert lengths[-1] == 6
    assert parts[-1]["text"] == whole["text"]
    assert "index" not in parts[0]


def test_streams_of_several_have_an_index(offline, vocabulary):
    last = {}
    for part in offline.generate(["a", "bb"], {**GREEDY, "n": 2}, stream=True):
        last[part["index"]] = part
    assert sorted(last) == [0, 1, 2, 3]
    assert last[3]["output_ids"] == alone(vocabulary, "bb")


def test_a_stream_that_is_left_early_is_aborted(offline, engine):
    stream = offline.generate("hello", {"max_new_tokens": 900, "ignore_eos": True}, stream=True)
    next(stream)
    stream.close()
    for _ in range(100):
        if offline.get_server_info()["stats"]["num_running"] == 0:
            break
    assert offline.get_server_info()["stats"]["num_running"] == 0
    assert len(engine.frontend._requests) == 0


async def test_from_an_event_loop(offline, vocabulary):
    answers = await asyncio.gather(*(offline.async_generate(text, GREEDY) for text in ("one", "two")))
    assert [answer["output_ids"] for answer in answers] == [alone(vocabulary, "one"), alone(vocabulary, "two")]
    parts = [part async for part in await offline.async_generate("one", GREEDY, stream=True)]
    assert parts[-1]["output_ids"] == alone(vocabulary, "one")


def test_from_several_threads(offline, vocabulary):
    answers = {}

    def work(text):
        answers[text] = offline.generate(text, GREEDY)["output_ids"]

    threads = [threading.Thread(target=work, args=(f"thread {index}",)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {text: alone(vocabulary, text) for text in answers}
    assert len(answers) == 8


@pytest.mark.parametrize("stream", [False, True])
def test_wrong_requests_raise(offline, stream):
    def ask(*args, **options):
        answer = offline.generate(*args, stream=stream, **options)
        return list(answer) if stream else answer

    with pytest.raises(RequestError, match="Did you mean 'max_new_tokens'"):
        ask("x", {"max_new_token": 3})
    with pytest.raises(RequestError, match="temperature must be between"):
        ask("x", {"temperature": -1})
    with pytest.raises(RequestError, match="top_p must be"):
        ask(["x", "y"], [GREEDY, {"top_p": 0}])
    with pytest.raises(RequestError, match="'rids' is not an option of generate"):
        ask("x", rids="a")
    assert ask("x", GREEDY)


def test_server_info_cache_and_abort(offline):
    offline.generate("a prompt that is cached", GREEDY)
    info = offline.get_server_info()
    assert info["plan"]["platform"] == "null"
    assert info["stats"]["cached_tokens"] > 0
    offline.abort("unknown")
    assert offline.flush_cache()
    assert offline.get_server_info()["stats"]["cached_tokens"] == 0


def test_progress_is_told_and_shutdown_is_final(null_config):
    seen = []
    config = null_config()
    engine = Engine(config=config, on_progress=lambda part, done, total: seen.append(part))
    with engine:
        assert "weights" in seen
        assert engine.generate("x", GREEDY)["output_ids"]
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        engine.generate("x", GREEDY)
    assert not engine._thread.is_alive()


def test_config_and_options_exclude_each_other():
    with pytest.raises(ConfigError, match="got config and model"):
        Engine(config=EngineConfig(), model="m")
    with pytest.raises(ConfigError, match="Did you mean 'model'"):
        Engine(modell="m")


def test_ends_from_many_threads_while_others_ask(start_engine):
    """Every call ends, with an answer or an error, whatever the moment at which the engine is shut down."""
    engine = start_engine(platform_options={"step_ms": 1}).engine
    seen = []

    def ask():
        while True:
            try:
                engine.generate("x", {"max_new_tokens": 3})
            except EngineDeadError as error:
                seen.append(str(error))
                return

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(4)]
    threads += [threading.Thread(target=engine.shutdown, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert seen == ["The engine was shut down."] * 4


async def test_an_engine_that_was_shut_down_says_so_to_coroutines(start_engine):
    engine = start_engine().engine
    engine.shutdown()
    with pytest.raises(EngineDeadError, match="was shut down"):
        await engine.async_generate("x")
    answers = await engine.async_generate("x", stream=True)
    with pytest.raises(EngineDeadError, match="was shut down"):
        async for _ in answers:
            pass
