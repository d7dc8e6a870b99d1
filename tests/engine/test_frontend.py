"""Requests through real processes: what comes back, what is refused, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import time

import psutil
import pytest

from cardan.engine.api import GenerateOutput, GenerateRequest
from cardan.engine.open_requests import Pending
from cardan.errors import EngineDeadError, PromptTooLongError, QueueFullError, RequestError
from cardan.testing.null_tokens import expected_tokens
from cardan.types import FinishKind, LogprobParams, SamplingParams


def request(prompt=(1, 2, 3), logprobs=None, rid=None, **sampling) -> GenerateRequest:
    sampling = {"max_new_tokens": 8, "temperature": 0.0, **sampling}
    return GenerateRequest(
        input_ids=tuple(prompt), sampling=SamplingParams(**sampling), logprobs=logprobs or LogprobParams(), rid=rid
    )


async def collect(frontend, wanted):
    return [output async for output in frontend.generate(wanted)]


def ids(outputs, index=0):
    return [token for output in outputs if output.index == index for token in output.token_ids]


async def wait_idle(frontend, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while True:
        stats = await frontend.stats()
        if (stats.num_running, stats.num_queued) == (0, 0) and stats.used_tokens == 0:
            return stats
        assert time.monotonic() < deadline, stats
        await asyncio.sleep(0.02)


def test_many_requests_at_once_get_what_each_gets_alone(engine, vocabulary):
    async def scenario():
        wanted = [
            request(
                [index % 7, *range(index % 50 + 1)], max_new_tokens=5 + index % 40, temperature=index % 2, seed=index
            )
            for index in range(150)
        ]
        answers = await asyncio.gather(*(collect(engine.frontend, one) for one in wanted))
        for one, outputs in zip(wanted, answers, strict=True):
            assert ids(outputs) == expected_tokens(one.input_ids, one.sampling, vocabulary)
            assert outputs[-1].finish_reason.kind is FinishKind.LENGTH
            assert [output.completion_tokens for output in outputs][-1] == one.sampling.max_new_tokens
        stats = await wait_idle(engine.frontend)
        assert stats.totals["generated_tokens"] >= sum(one.sampling.max_new_tokens for one in wanted)
        assert len(engine.frontend._requests) == 0

    engine.run(scenario())


def test_text_is_the_text_of_the_tokens(engine):
    async def scenario():
        outputs = await collect(engine.frontend, GenerateRequest(text="héllo", sampling=SamplingParams(seed=1)))
        assert outputs[0].prompt_tokens == len("héllo".encode())
        assert "".join(output.text for output in outputs) == bytes(
            token for token in ids(outputs) if token < 256
        ).decode("utf-8", "replace")

    engine.run(scenario())


def test_a_long_text_is_tokenized_beside_the_loop(engine, monkeypatch):
    import threading

    threads = []
    tokenizer = engine.frontend.tokenizer
    encode = type(tokenizer).encode
    monkeypatch.setattr(
        type(tokenizer),
        "encode",
        lambda self, *args: threads.append(threading.current_thread().name) or encode(self, *args),
    )

    async def scenario():
        with pytest.raises(PromptTooLongError):
            await collect(engine.frontend, GenerateRequest(text="x" * 5000))
        await collect(engine.frontend, GenerateRequest(text="x", sampling=SamplingParams(max_new_tokens=1)))

    engine.run(scenario())
    assert threads[0].startswith("tokenize")
    assert threads[1] == "cardan-engine"


def test_n_choices_are_seeded_one_after_the_other(engine, vocabulary):
    async def scenario():
        outputs = await collect(engine.frontend, request(n=3, seed=2**64 - 2, temperature=1.0))
        for index in range(3):
            params = SamplingParams(max_new_tokens=8, temperature=1.0, seed=(2**64 - 2 + index) % 2**64)
            assert ids(outputs, index) == expected_tokens((1, 2, 3), params, vocabulary)
        assert {output.index for output in outputs if output.finish_reason} == {0, 1, 2}

    engine.run(scenario())


def test_logprobs_and_prompt_logprobs(engine):
    async def scenario():
        wanted = LogprobParams(output=True, prompt_start=1, top=2, token_ids=(7,))
        outputs = await collect(engine.frontend, request((5, 6, 7, 8), wanted, max_new_tokens=3))
        assert outputs[0].prompt_token_ids == (6, 7, 8)
        assert len(outputs[0].prompt_logprobs) == 3
        logprobs = [item for output in outputs for item in output.logprobs]
        assert len(logprobs) == 3
        assert all(len(item.top) == 2 and item.chosen[0][0] == 7 for item in logprobs)

    engine.run(scenario())


def test_a_prompt_is_scored_without_output(engine):
    async def scenario():
        wanted = LogprobParams(output=True, prompt_start=0)
        (output,) = await collect(engine.frontend, request((5, 6, 7), wanted, max_new_tokens=0))
        assert output.token_ids == ()
        assert len(output.prompt_logprobs) == 3
        assert output.finish_reason.kind is FinishKind.LENGTH

    engine.run(scenario())


def test_cached_tokens_and_times_are_reported(engine):
    async def scenario():
        prompt = [9] * 50
        await collect(engine.frontend, request(prompt))
        outputs = await collect(engine.frontend, request(prompt))
        assert outputs[-1].cached_tokens == 49
        times = outputs[-1].times
        assert 0 <= times.queue_s <= times.first_token_s <= times.e2e_s

    engine.run(scenario())


def test_the_limit_on_output_is_reported(engine):
    async def scenario():
        stream = engine.frontend.generate(request(max_new_tokens=100_000, ignore_eos=True))
        output = await anext(stream)
        await stream.aclose()
        assert 1900 < output.max_new_tokens_clamped < 2000

    engine.run(scenario())


def test_stop_strings_end_and_are_trimmed(engine, vocabulary):
    async def scenario():
        plain = await collect(engine.frontend, request(max_new_tokens=40))
        text = "".join(output.text for output in plain)
        stop = text[10:13]
        outputs = await collect(engine.frontend, request(max_new_tokens=40, stop=(stop,)))
        assert "".join(output.text for output in outputs) == text[: text.index(stop)]
        assert outputs[-1].finish_reason.matched == stop

    engine.run(scenario())


@pytest.mark.parametrize(
    ("wanted", "error", "param"),
    [
        (request(temperature=-1.0), RequestError, "temperature"),
        (request((1, 260)), RequestError, "input_ids"),
        (request(()), RequestError, "input_ids"),
        (request(range(256), n=0), RequestError, "n"),
        (request(stop_regex=("(",)), RequestError, "stop_regex"),
        (request([1] * 1999), PromptTooLongError, "prompt"),
        (GenerateRequest(text="\ud800"), RequestError, None),
    ],
    ids=["temperature", "ids", "empty", "n", "regex", "long", "surrogate"],
)
def test_wrong_requests_are_refused_and_lose_nothing(engine, wanted, error, param):
    async def scenario():
        before = await wait_idle(engine.frontend)
        with pytest.raises(error) as caught:
            await collect(engine.frontend, wanted)
        if param is not None:
            assert caught.value.param == param
        assert len(engine.frontend._requests) == 0
        after = await wait_idle(engine.frontend)
        assert after.totals["generated_tokens"] == before.totals.get("generated_tokens", 0)
        assert await collect(engine.frontend, request())

    engine.run(scenario())


def test_a_prompt_of_millions_of_tokens_never_leaves_the_frontend(engine, monkeypatch):
    sent = []
    monkeypatch.setattr(engine.frontend, "_send", sent.append)

    async def scenario():
        with pytest.raises(PromptTooLongError, match="The prompt has 3000000 tokens, but at most"):
            # An id out of range at its end is not reached.
            await collect(engine.frontend, request([1] * 2_999_999 + [10**9]))

    engine.run(scenario())
    assert sent == []


def test_open_rids_are_refused_and_may_be_used_again(engine):
    async def scenario():
        first = engine.frontend.generate(request(rid="mine", max_new_tokens=500, ignore_eos=True))
        await anext(first)
        with pytest.raises(RequestError, match="'mine' is open already") as caught:
            await collect(engine.frontend, request(rid="mine"))
        assert caught.value.code == "duplicate_rid"
        await first.aclose()
        again = await collect(engine.frontend, request(rid="mine"))
        assert again[-1].finish_reason.kind is FinishKind.LENGTH
        assert again[-1].rid == "mine"

    engine.run(scenario())


def test_abort_ends_all_choices_of_a_request_and_no_other(engine):
    async def scenario():
        long = request(rid="long", n=2, max_new_tokens=900, ignore_eos=True)
        other = asyncio.create_task(collect(engine.frontend, request(max_new_tokens=50)))
        outputs = []
        async for output in engine.frontend.generate(long):
            outputs.append(output)
            if len(outputs) == 3:
                await engine.frontend.abort("unknown")
                await engine.frontend.abort("long")
        ends = [output.finish_reason.kind for output in outputs if output.finish_reason]
        assert ends == [FinishKind.ABORT, FinishKind.ABORT]
        assert (await other)[-1].finish_reason.kind is FinishKind.LENGTH
        await wait_idle(engine.frontend)

    engine.run(scenario())


@pytest.mark.parametrize("rid", ["early", None])
def test_an_abort_reaches_a_request_whose_prompt_is_being_tokenized(engine, monkeypatch, rid):
    tokenizing, may_go_on = asyncio.Event(), asyncio.Event()

    async def slowly(text, add_special_tokens):
        tokenizing.set()
        await may_go_on.wait()
        return [1, 2, 3]

    async def scenario():
        monkeypatch.setattr(engine.frontend, "_tokenize", slowly)
        sampling = SamplingParams(max_new_tokens=500, ignore_eos=True, n=2)
        wanted = GenerateRequest(text="x", rid="early", sampling=sampling)
        running = asyncio.create_task(collect(engine.frontend, wanted))
        await tokenizing.wait()
        await engine.frontend.abort("another")
        await engine.frontend.abort(rid)
        may_go_on.set()
        outputs = await running
        assert {output.finish_reason.kind for output in outputs if output.finish_reason} == {FinishKind.ABORT}
        assert len(ids(outputs)) < 500
        assert not engine.frontend._admissions
        await wait_idle(engine.frontend)

    engine.run(scenario())


def test_abort_of_everything(engine):
    async def scenario():
        tasks = [
            asyncio.create_task(collect(engine.frontend, request([index], max_new_tokens=900))) for index in range(5)
        ]
        await asyncio.sleep(0.1)
        await engine.frontend.abort(None)
        for task in tasks:
            assert (await task)[-1].finish_reason.kind is FinishKind.ABORT
        await wait_idle(engine.frontend)

    engine.run(scenario())


def test_news_wait_for_a_slow_consumer_as_one_output_per_choice(engine):
    wanted = request([5, 6, 7], LogprobParams(output=True, prompt_start=0), n=2, max_new_tokens=60, ignore_eos=True)

    async def scenario():
        prompt = await collect(engine.frontend, wanted)
        stream = engine.frontend.generate(wanted)
        slow = [await anext(stream)]
        await wait_idle(engine.frontend)
        await asyncio.sleep(0.1)
        slow += [output async for output in stream]
        return prompt, slow

    prompt, slow = engine.run(scenario())
    assert len(slow) <= 3 < len(prompt)
    for index in (0, 1):
        theirs, ours = ([output for output in news if output.index == index] for news in (prompt, slow))
        assert ids(ours, index) == ids(theirs, index)
        for field in ("text", "logprobs", "prompt_logprobs", "prompt_token_ids"):
            whole, joined = ([piece for o in news for piece in getattr(o, field)] for news in (theirs, ours))
            assert whole == joined
            assert whole
        assert ours[-1].finish_reason == theirs[-1].finish_reason
        assert ours[-1].completion_tokens == 60
        assert ours[-1].times.first_token_s < ours[-1].times.e2e_s


async def test_an_error_comes_after_the_news_that_were_there():
    pending = Pending()
    pending.put(GenerateOutput(rid="a", text="x", token_ids=(1,)))
    pending.fail(EngineDeadError("first"))
    pending.fail(EngineDeadError("second"))
    pending.put(GenerateOutput(rid="a", text="y", token_ids=(2,)))
    assert (await pending.take()).text == "xy"
    with pytest.raises(EngineDeadError, match="first"):
        await pending.take()


def test_a_hundred_vanished_consumers_leave_nothing(engine):
    async def scenario():
        async def vanish(index):
            stream = engine.frontend.generate(request([index, 1], max_new_tokens=900, ignore_eos=True))
            if index % 3 == 0:
                await anext(stream)
                await stream.aclose()
                return
            task = asyncio.create_task(anext(stream))
            await asyncio.sleep(0.001 * (index % 10))
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        await asyncio.gather(*(vanish(index) for index in range(100)))
        gc.collect()
        stats = await wait_idle(engine.frontend)
        assert len(engine.frontend._requests) == 0
        assert engine.frontend._requests._by_wire_id == {}
        assert stats.used_tokens == 0
        assert await engine.frontend.flush_cache()
        assert (await engine.frontend.stats()).cached_tokens == 0

    engine.run(scenario())


def test_an_iterator_that_was_never_started_costs_nothing(engine):
    async def scenario():
        engine.frontend.generate(request())
        gc.collect()
        assert len(engine.frontend._requests) == 0
        await wait_idle(engine.frontend)

    engine.run(scenario())


def test_the_cache_is_not_flushed_while_requests_run(engine):
    async def scenario():
        stream = engine.frontend.generate(request(max_new_tokens=900, ignore_eos=True))
        await anext(stream)
        assert not await engine.frontend.flush_cache()
        await stream.aclose()
        await wait_idle(engine.frontend)
        assert await engine.frontend.flush_cache()

    engine.run(scenario())


def test_what_is_served_is_known(engine, tiny_model):
    info = engine.frontend.info
    assert info.model_path == str(tiny_model)
    assert info.vocab_size == 260
    assert info.max_total_tokens == 2000
    assert info.max_input_tokens == 1994
    assert info.plan["platform"] == "null"
    assert {"weights", "total"} <= set(info.started_s)
    assert engine.frontend.alive


def test_an_idle_engine_uses_no_processor_time(engine):
    engine.run(wait_idle(engine.frontend))
    children = [psutil.Process(pid) for pid in engine.frontend.child_pids.values()]

    def used():
        return sum(sum(child.cpu_times()[:2]) for child in children)

    before = used()
    time.sleep(1.5)
    assert used() - before <= 0.03


def test_the_main_process_imports_neither_torch_nor_a_platform(null_config, tmp_path):
    script = (
        "import asyncio, sys\n"
        "from cardan.engine import Frontend\n"
        "from cardan.engine.options import config_from_options\n"
        "from cardan.testing import write_tiny_model\n"
        "from pathlib import Path\n"
        "async def main():\n"
        f"    model = write_tiny_model(Path({str(tmp_path / 'tiny')!r}))\n"
        "    config = config_from_options({'platform': 'null', 'model': str(model), 'log_level': 'error'})\n"
        "    frontend = await Frontend.start(config)\n"
        "    folder = frontend._folder\n"
        "    assert folder.stat().st_mode & 0o777 == 0o700, oct(folder.stat().st_mode)\n"
        "    await frontend.close()\n"
        "    assert not folder.exists()\n"
        "asyncio.run(main())\n"
        "bad = {'torch', 'transformers', 'cardan_cpu', 'cardan_torch', 'cardan.testing.null_platform'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)\n"
    )
    # No guard against being imported again: children are fresh interpreters, not copies of this script.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_the_child_processes_load_nothing_that_only_the_server_needs(tiny_model, role):
    code = (
        f"import sys, cardan.engine.{role}_process\n"
        "from cardan.config import ModelConfig\n"
        "from cardan.engine.model_files import load_model_tokenizer\n"
        f"tokenizer = load_model_tokenizer(ModelConfig(model={str(tiny_model)!r}), renders_chat=False)\n"
        "loaded = {'jinja2', 'pydantic', 'starlette', 'uvicorn', 'rich', 'cyclopts'} & set(sys.modules)\n"
        "print(tokenizer.has_chat_template, sorted(tokenizer.eos_ids), sorted(loaded))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False [258] []\n"


def test_a_full_queue_is_told_apart(start_engine):
    started = start_engine(max_queued_requests=1, max_running_requests=1, platform_options={"step_ms": 20})

    async def scenario():
        running = started.frontend.generate(request(max_new_tokens=500))
        await anext(running)
        waiting = asyncio.create_task(collect(started.frontend, request((4, 5))))
        while (await started.frontend.stats()).num_queued == 0:
            await asyncio.sleep(0.01)
        with pytest.raises(QueueFullError, match="--max-queued-requests"):
            await collect(started.frontend, request((6, 7)))
        await running.aclose()
        assert (await waiting)[-1].finish_reason.kind is FinishKind.LENGTH

    started.run(scenario())


def test_draining_takes_nothing_new_and_reports_what_remains(start_engine):
    started = start_engine(platform_options={"step_ms": 5})

    async def scenario():
        frontend = started.frontend
        short = asyncio.create_task(collect(frontend, request(max_new_tokens=20)))
        long = asyncio.create_task(collect(frontend, request(rid="long", max_new_tokens=1000)))
        await asyncio.sleep(0.05)
        assert await frontend.drain(0.8) == ["long"]
        with pytest.raises(QueueFullError, match="shutting down"):
            await collect(frontend, request())
        assert (await short)[-1].finish_reason.kind is FinishKind.LENGTH
        await frontend.abort(None)
        await long
        assert await frontend.drain(1.0) == []

    started.run(scenario())


def test_stream_interval_batches_chunks(start_engine):
    started = start_engine(stream_interval=4)

    async def scenario():
        outputs = await collect(started.frontend, request(max_new_tokens=10))
        sizes = [len(output.token_ids) for output in outputs]
        assert sum(sizes) == 10
        assert all(size >= 4 for size in sizes[1:-1])
        assert len(sizes) < 6

    started.run(scenario())


def test_the_null_model_needs_no_files(start_engine, tmp_path, monkeypatch, vocabulary):
    monkeypatch.setenv("CARDAN_CACHE", str(tmp_path))
    started = start_engine(model="null")

    async def scenario():
        outputs = await collect(started.frontend, request())
        assert ids(outputs) == expected_tokens((1, 2, 3), SamplingParams(max_new_tokens=8, temperature=0), vocabulary)
        assert started.frontend.info.model_name == "null"
        messages = [{"role": "user", "content": "hi"}]
        assert started.frontend.tokenizer.render_chat(messages) == (
            "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        )

    started.run(scenario())
