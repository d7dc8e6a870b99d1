"""Crash dumps: what they hold, what they never hold, and that they can be sent again."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from server_fakes import FakeEngine, FakeTokenizer
from test_admin import Background
from test_serve import ServerProcess

from cardan.cli.replaying import read_dump, replay
from cardan.config import ServerConfig
from cardan.engine.api import GenerateRequest
from cardan.errors import ConfigError
from cardan.server.watching.crash_dump import MOST_AGE_S, MOST_REQUESTS, CrashMemory, sendable
from cardan.server.watching.observers import Observers
from cardan.types import LogprobParams, Pooling, SamplingParams


def test_the_death_of_the_engine_is_written_down(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "dumps"
    server = ServerProcess(delay_s=0.02, server={"crash_dump_folder": str(folder), "api_key": "secret-key"})
    headers = {"Authorization": "Bearer secret-key"}
    try:
        server.wait_ready()
        with server.client() as client:
            assert client.post("/generate", json={"text": "ends well"}, headers=headers).status_code == 200
            dying = {"text": "[die]", "rid": "the-last", "sampling_params": {"max_new_tokens": 9, "seed": 3}}
            assert client.post("/generate", json=dying, headers=headers).status_code == 503
        assert server.end() == 1
    finally:
        server.close()
    (path,) = folder.iterdir()
    assert "secret-key" not in path.read_text()
    dump = read_dump(path)
    assert dump["reason"] == "The scheduler process ended with exit code 9."
    assert dump["model"] == "tiny"
    bodies = [entry["body"] for entry in dump["finished"] + dump["running"]]
    assert [body["text"] for body in bodies] == ["ends well", "[die]"]
    assert bodies[1]["rid"] == "the-last"
    assert bodies[1]["sampling_params"] | {"max_new_tokens": 9, "seed": 3} == bodies[1]["sampling_params"]
    assert dump["finished"][0]["finish_reasons"] == ["length"]


def test_requests_that_run_are_told_from_those_that_ended(start_fake: Any, tmp_path: Path) -> None:
    engine = FakeEngine()
    server = start_fake(engine, crash_dump_folder=str(tmp_path))
    server.http.post("/generate", json={"text": "ended"})
    engine.hang = True
    with Background(server, rid="runs"):
        observers: Observers = server.app.state.observers
        assert observers.crash is not None
        path = observers.crash.write(server.config, engine)
        assert path is not None
        dump = read_dump(path)
        engine.hang = False
    assert [entry["body"]["text"] for entry in dump["finished"]] == ["ended"]
    assert [entry["body"]["rid"] for entry in dump["running"]] == ["runs"]
    assert dump["running"][0]["ended"] is None


def test_only_the_last_minutes_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    memory, request = CrashMemory(tmp_path), GenerateRequest(text="x")
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s)
    for _ in range(MOST_REQUESTS + 10):
        memory.watch([request]).close()
    assert len(memory._finished) == MOST_REQUESTS
    now_s += MOST_AGE_S + 1
    memory.watch([request]).close()
    assert len(memory._finished) == 1


def test_a_body_says_all_that_the_request_did() -> None:
    sampling = SamplingParams(temperature=0.0, stop=("end",), logit_bias={5: -1.0}, n=2)
    logprobs = LogprobParams(output=True, prompt_start=1, top=2, token_ids=(7,))
    request = GenerateRequest(
        input_ids=(1, 2), sampling=sampling, logprobs=logprobs, rid="r", priority=3, cache_salt="s"
    )
    path, body = sendable(request, FakeTokenizer())  # type: ignore[arg-type]
    assert path == "/generate"
    assert body["input_ids"] == [1, 2]
    told = body["sampling_params"]
    assert (told["temperature"], told["stop"], told["logit_bias"], told["n"]) == (0.0, ("end",), {5: -1.0}, 2)
    assert told["top_p"] == 1.0
    assert body["token_ids_logprob"] == [7]
    assert (body["logprob_start_len"], body["top_logprobs_num"], body["priority"]) == (1, 2, 3)


def test_replay_sends_what_the_dump_holds(start_fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_fake(crash_dump_folder=str(tmp_path))
    params = {"max_new_tokens": 3, "temperature": 0, "logit_bias": {"7": 1.5}, "stop": ["zz"]}
    logprobs = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 1}
    for text in ("one", "two"):
        server.http.post("/generate", json={"text": text, "sampling_params": params, **logprobs})
    server.http.post("/generate", json={"text": "three", "sampling_params": {"regex": "[a-z]+"}})
    path = server.app.state.observers.crash.write(server.config, server.engine)
    before, server.engine.seen = list(server.engine.seen), []
    assert replay(path, base_url=server.url) == 0
    assert "200" in capsys.readouterr().out
    before, after = (sorted(seen, key=lambda request: str(request.text)) for seen in (before, server.engine.seen))
    assert [(r.text, r.sampling, r.logprobs) for r in after] == [(r.text, r.sampling, r.logprobs) for r in before]


def test_prompts_of_chats_and_embeddings_mean_the_same_again() -> None:
    tokenizer: Any = FakeTokenizer()
    _, chat = sendable(GenerateRequest(text="ab", add_special_tokens=False), tokenizer)
    assert chat["input_ids"] == [97, 98]
    assert "text" not in chat
    assert sendable(GenerateRequest(text="ab", pooling=Pooling.LAST), tokenizer) == ("/v1/embeddings", {"input": "ab"})


def test_replay_tells_of_failures(start_fake: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start_fake(crash_dump_folder=str(tmp_path))
    server.http.post("/generate", json={"text": "x"})
    path = server.app.state.observers.crash.write(server.config, server.engine)
    server.engine.full = True
    assert replay(path, base_url=server.url) == 1
    assert "503" in capsys.readouterr().out
    assert replay(path, base_url="http://127.0.0.1:9") == 1
    assert "no answer (ConnectError)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is no crash dump"),
        ("[]", "is no crash dump of format 1, got None"),
        ('{"format": 2}', "is no crash dump of format 1, got 2"),
        ('{"format": 1}', "is a damaged crash dump"),
        (
            json.dumps(
                {"format": 1, "model": "", "version": "", "time": "", "reason": "", "running": [1], "finished": []}
            ),
            "is a damaged crash dump",
        ),
    ],
)
def test_files_that_are_no_dumps(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "dump.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_dump(path)


def test_folders_and_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dump(tmp_path / "missing.json")
    taken = tmp_path / "file"
    taken.touch()
    with pytest.raises(ConfigError, match=r"--crash-dump-folder .* cannot be written"):
        Observers.open(ServerConfig(crash_dump_folder=str(taken)))


def test_a_dump_that_cannot_be_written_ends_nothing(start_fake: Any, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    server = start_fake(crash_dump_folder=str(folder))
    folder.rmdir()
    assert server.app.state.observers.crash.write(server.config, server.engine) is None
    assert httpx.get(f"{server.url}/health", verify=False).status_code == 200
