"""What happens when a process fails, is killed, or never starts."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from cardan.engine import Engine, Frontend, frontend
from cardan.engine.api import GenerateRequest
from cardan.engine.preparation import resolve_plan
from cardan.errors import (
    CheckpointError,
    ConfigError,
    EngineBusyError,
    EngineDeadError,
    MemoryPlanError,
    ModelNotFoundError,
    PlatformNotFoundError,
    RequestError,
    UnsupportedModelError,
)
from cardan.types import SamplingParams

LONG = SamplingParams(max_new_tokens=3000, ignore_eos=True)


async def drink(stream):
    async for _ in stream:
        pass


def gone(pids, timeout_s=5.0) -> bool:
    """Whether processes ended; one that only waits to be reaped has."""
    deadline = time.monotonic() + timeout_s

    def ended(pid):
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    while not all(ended(pid) for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("role", ["scheduler", "detokenizer"])
def test_a_killed_process_ends_every_stream_with_an_error(start_engine, role):
    started = start_engine(platform_options={"step_ms": 2})

    async def scenario():
        frontend = started.frontend
        streams = [frontend.generate(GenerateRequest(input_ids=(index,), sampling=LONG)) for index in range(10)]
        for stream in streams:
            await anext(stream)
        idle = asyncio.create_task(drink(frontend.generate(GenerateRequest(input_ids=(99,), sampling=LONG))))
        pids = dict(frontend.child_pids)
        killed_s = time.monotonic()
        os.kill(pids[role], signal.SIGKILL)
        answers = await asyncio.gather(*(drink(stream) for stream in streams), idle, return_exceptions=True)
        assert time.monotonic() - killed_s < 5
        assert all(isinstance(answer, EngineDeadError) for answer in answers)
        assert f"The {role} process was killed by SIGKILL" in str(answers[0])
        assert len({id(answer) for answer in answers}) == len(answers), "each has an exception of its own"
        assert not frontend.alive
        assert str(await frontend.wait_dead()) == str(answers[0])
        for call in (frontend.stats(), frontend.flush_cache(), drink(frontend.generate(GenerateRequest(text="x")))):
            with pytest.raises(EngineDeadError):
                await call
        await frontend.abort(None)
        return pids

    pids = started.run(scenario())
    assert gone(pids.values()), "the other process is ended too"
    folder = started.frontend._folder
    started.engine.shutdown()
    assert not folder.exists()


def test_a_crash_on_the_device_reaches_every_request(start_engine):
    started = start_engine(platform_options={"crash_after": 5})

    async def scenario():
        streams = [started.frontend.generate(GenerateRequest(input_ids=(index,), sampling=LONG)) for index in range(3)]
        answers = await asyncio.gather(*(drink(stream) for stream in streams), return_exceptions=True)
        message = "The scheduler process failed (RuntimeError: The null device was told to fail after 5 steps.); "
        assert all(str(answer).startswith(message) for answer in answers)
        assert all(isinstance(answer, EngineDeadError) for answer in answers)

    started.run(scenario())


def test_a_nan_ends_one_request_only(start_engine):
    started = start_engine(platform_options={"nan_token": 66})

    async def scenario():
        params = SamplingParams(max_new_tokens=5, logit_bias={66: -100.0})
        outputs = [
            [item async for item in started.frontend.generate(GenerateRequest(input_ids=prompt, sampling=params))][-1]
            for prompt in ((1, 66), (66, 1))
        ]
        assert [str(output.finish_reason.kind) for output in outputs] == ["error", "length"]
        assert "NaN" in outputs[0].finish_reason.message

    started.run(scenario())


def broken_model(tmp_path: Path, tiny_model: Path, architecture: str) -> str:
    folder = tmp_path / "broken"
    folder.mkdir()
    for file in tiny_model.iterdir():
        (folder / file.name).write_text(file.read_text().replace("LlamaForCausalLM", architecture))
    return str(folder)


def test_errors_of_the_start_keep_class_and_message(null_config, tmp_path, tiny_model):
    before = set(psutil.Process().children())
    cases = [
        ({"model": "/no/such/folder"}, ModelNotFoundError, "/no/such/folder"),
        ({"model": broken_model(tmp_path, tiny_model, "NoSuchModel")}, UnsupportedModelError, "NoSuchModel"),
        ({"platform": "nonesuch"}, PlatformNotFoundError, "No platform plugin is named 'nonesuch'"),
        ({"max_total_tokens": 500_000, "platform_options": {"memory_mb": 1}}, MemoryPlanError, "memory_mb"),
        ({"platform_options": {"step_msec": 1}}, ConfigError, "step_msec"),
    ]
    for options, kind, message in cases:
        with pytest.raises(kind) as caught:
            Engine(config=null_config(**options))
        assert message in str(caught.value)
    assert set(psutil.Process().children()) == before, "no process is left behind"


def test_a_tokenizer_that_cannot_be_read_fails_the_start(null_config, tmp_path, tiny_model):
    model = broken_model(tmp_path, tiny_model, "LlamaForCausalLM")
    (Path(model) / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Engine(config=null_config(model=model))


async def test_a_process_that_dies_while_it_starts_is_named(null_config, monkeypatch):
    from cardan.engine import children

    monkeypatch.setattr(children, "_BOOTSTRAP", "raise SystemExit(3)")
    with pytest.raises(EngineDeadError, match="process ended with exit code 3"):
        await asyncio.wait_for(Frontend.start(null_config()), 20)


async def test_a_start_that_is_cancelled_leaves_nothing(null_config):
    before = set(psutil.Process().children())
    task = asyncio.create_task(Frontend.start(null_config()))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert set(psutil.Process().children()) == before


PARENT = """
import sys, time
from cardan.engine import Engine
from cardan.engine.options import config_from_options
engine = Engine(platform="null", model=sys.argv[1], log_level="error")
print(*engine._frontend.child_pids.values(), flush=True)
for _ in engine.generate("x", {"max_new_tokens": 3000, "ignore_eos": True}, stream=True):
    time.sleep(0.02)
"""


@pytest.fixture
def parent(tiny_model):
    """A process of its own group that runs an engine, and the ids of its children."""
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tiny_model)], stdout=subprocess.PIPE, text=True, process_group=0
    )
    pids = [int(word) for word in process.stdout.readline().split()]
    yield process, pids
    process.kill()
    process.wait()
    process.stdout.close()


def test_children_end_with_their_parent(parent):
    process, pids = parent
    assert len(pids) == 2
    (folder,) = {Path(path).parent for path in bound_sockets(pids)}
    process.kill()
    process.wait()
    assert gone(pids)
    assert not folder.exists(), "nobody else could clear it"


def bound_sockets(pids):
    return [link.laddr for pid in pids for link in psutil.Process(pid).net_connections("unix") if link.laddr]


def test_children_ignore_signals_to_the_group(parent):
    process, pids = parent
    os.kill(process.pid, signal.SIGSTOP)
    for number in (signal.SIGINT, signal.SIGTERM):
        for pid in pids:
            os.kill(pid, number)
    time.sleep(0.3)
    assert all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
    os.kill(process.pid, signal.SIGCONT)


def test_a_process_that_does_not_end_is_killed(start_engine):
    started = start_engine()
    pids = started.frontend.child_pids
    os.kill(pids["scheduler"], signal.SIGSTOP)
    start_s = time.monotonic()
    started.engine.shutdown()
    assert time.monotonic() - start_s < 12
    assert gone(pids.values())


def test_news_that_cannot_be_taken_end_every_request(start_engine):
    started = start_engine(platform_options={"step_ms": 5})

    async def scenario():
        frontend = started.frontend
        stream = frontend.generate(GenerateRequest(input_ids=(1, 2), sampling=SamplingParams(max_new_tokens=900)))
        await anext(stream)
        frontend._requests.deliver = lambda news: {}["no such choice"]
        with pytest.raises(EngineDeadError, match=r"Taking news of the engine failed.*no such choice.*Restart"):
            async for _ in stream:
                pass
        assert not frontend.alive
        await frontend.wait_dead()

    started.run(scenario())


def test_open_requests_hear_of_a_shutdown(start_engine):
    started = start_engine(platform_options={"step_ms": 5})
    stream = started.engine.generate("x", {"max_new_tokens": 3000}, stream=True)
    next(stream)

    async def shut_down_under(frontend):
        reader = asyncio.create_task(drink(frontend.generate(GenerateRequest(text="y", sampling=LONG))))
        await asyncio.sleep(0.05)
        await frontend.close()
        with pytest.raises(EngineDeadError, match="was shut down"):
            await reader

    started.run(shut_down_under(started.frontend))
    with pytest.raises(EngineDeadError, match="was shut down"):
        list(stream)


@pytest.mark.parametrize("field", ["rid", "cache_salt", "routing_key", "stop"])
def test_text_that_no_encoding_holds_is_refused_and_leaves_nothing(start_engine, field):
    started = start_engine()
    wrong = "half \ud800"
    options = {"sampling_params": {"stop": [wrong]}} if field == "stop" else {field: wrong}
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        started.engine.generate("x", **options)
    assert started.frontend._requests.rids == []


@pytest.mark.parametrize(("folder", "advice"), [("missing", "can be written"), ("d" * 100, "a shorter one")])
def test_a_folder_that_cannot_hold_sockets(null_config, tmp_path, monkeypatch, folder, advice):
    if folder != "missing":
        (tmp_path / folder).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / folder))
    with pytest.raises(ConfigError, match=f"Set TMPDIR to .*{advice}"):
        Engine(config=null_config())


def test_a_scheduler_that_does_not_answer_is_told_of_and_its_late_answers_are_dropped(start_engine, monkeypatch):
    monkeypatch.setattr(frontend, "_ANSWER_S", 0.2)
    started = start_engine()
    ours, pid = started.frontend, started.frontend.child_pids["scheduler"]

    async def scenario():
        os.kill(pid, signal.SIGSTOP)
        try:
            for call in (ours.stats, ours.flush_cache):
                with pytest.raises(EngineBusyError, match=r"has not answered for 0\.2 s.*Try again later") as caught:
                    await asyncio.wait_for(call(), 5)
                assert caught.value.retry_after_s > 0
            assert ours._calls == {}
        finally:
            os.kill(pid, signal.SIGCONT)
        stats = None
        while stats is None:
            with contextlib.suppress(EngineBusyError):
                stats = await ours.stats()
        assert stats.num_running == 0
        assert await ours.flush_cache()
        assert ours._calls == {}

    started.run(scenario())


@pytest.mark.parametrize("flag", ["schedule_policy", "radix_eviction_policy"])
def test_a_policy_that_is_unknown_is_refused_before_any_weight_is_read(null_config, flag):
    with pytest.raises(ConfigError, match=f"--{flag.replace('_', '-')} must be one of .*, got 'nope'"):
        resolve_plan(null_config(**{flag: "nope"}))
