"""Records from transformers and from servers: numbers that agree with those of the whole logits."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from accuracy_tiny import tiny_config

from cardan.accuracy.cases import Text
from cardan.accuracy.comparison import compare
from cardan.accuracy.from_server import CompletionsServer, ServerError, record_server
from cardan.accuracy.from_transformers import record_transformers
from cardan.accuracy.golden import read_golden
from cardan.accuracy.recording import Wanted, record
from cardan.accuracy.verdict import Verdict
from cardan.cli import app
from cardan.errors import CardanError, ConfigError


def whole_logprobs(model: Path, dtype: str, ids: tuple[int, ...]) -> np.ndarray:
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        return loaded(torch.tensor([ids])).logits[0].double().log_softmax(-1).numpy()


def test_numbers_agree_with_those_of_transformers_logits(tiny_llama: Path, cases) -> None:
    """KL over all tokens, and perplexity, of bfloat16 against float32, both computed here from whole logits."""
    wanted = Wanted(cases=cases, top=97, greedy=False)
    sides = {
        dtype: record_transformers(tiny_config(tiny_llama, dtype=dtype), wanted) for dtype in ("float32", "bfloat16")
    }
    compared = compare(sides["float32"], sides["bfloat16"])
    values, own = [], []
    for entry in sides["float32"].cases:
        ids, start = entry.case.ids, entry.case.score_from
        p, q = (whole_logprobs(tiny_llama, dtype, ids[:-1])[start - 1 :] for dtype in ("float32", "bfloat16"))
        values.append((np.exp(p) * (p - q)).sum(axis=1))
        targets = np.asarray(ids[start:])
        own.append(np.stack([side[np.arange(len(targets)), targets] for side in (p, q)], axis=1))
    mean = np.concatenate(values).mean()
    assert mean > 1e-4
    assert compared.all_positions.mean.value == pytest.approx(mean, rel=1e-3)
    perplexities = np.exp(-np.concatenate(own).mean(axis=0))
    assert compared.perplexities.ours == pytest.approx(perplexities[0], rel=1e-5)
    assert compared.perplexities.theirs == pytest.approx(perplexities[1], rel=1e-5)


def test_transformers_is_the_truth_for_cardan(tiny_llama: Path, recorded, cases) -> None:
    truth = record_transformers(tiny_config(tiny_llama), Wanted(cases=cases))
    compared = compare(truth, recorded())
    assert compared.judgement.verdict is Verdict.SAME, compared.judgement
    assert compared.judgement.band_from.startswith("measured on one side only: ")
    assert all(case.flip is None for case in compared.cases)
    assert truth.fingerprint.versions["transformers"]
    assert not truth.fingerprint.weights


# --- servers ---


class _Server(BaseHTTPRequestHandler):
    """Completions with logprobs from a table of answers; it records what it was asked."""

    answers: ClassVar[dict[str, Any]] = {}
    asked: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self._reply(self.answers["models"])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append(body)
        self._reply(self.answers["echo" if body.get("echo") else "free"](body))

    def _reply(self, value: Any) -> None:
        content = json.dumps(value).encode()
        self.send_response(self.answers.get("status", 200))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    _Server.answers = {"models": {"data": [{"id": "served"}]}}
    _Server.asked = []
    made = HTTPServer(("127.0.0.1", 0), _Server)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}/v1"
    made.shutdown()
    made.server_close()
    thread.join()


WANTED = Wanted(texts=(Text(name="a", text="SOME TEXT"),), top=8, noise=False, semantics=False)


def _form(tokens: list[int], logprobs: np.ndarray, own: list[int]) -> dict[str, Any]:
    """OpenAI's parallel lists, of the likeliest eight; ids are bytes with the tiny tokenizer."""
    rows = [{chr(i): float(row[i]) for i in np.argsort(-row)[:8]} for row in logprobs]
    values = [float(row[token]) for row, token in zip(logprobs, own, strict=True)]
    return {"tokens": [chr(token) for token in tokens], "token_logprobs": values, "top_logprobs": rows}


def test_a_servers_logprobs_make_a_record(model: Path, server: str) -> None:
    """The server here answers with transformers' numbers; a platform of Cardan's agrees with it."""

    def echo(body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        form = _form(ids[1:], whole_logprobs(model, "float32", tuple(ids))[:-1], ids[1:])
        return {"choices": [{"logprobs": {name: [None, *values] for name, values in form.items()}}]}

    def free(body: dict[str, Any]) -> dict[str, Any]:
        ids = list(body["prompt"])
        for _ in range(body["max_tokens"]):
            ids.append(int(whole_logprobs(model, "float32", tuple(ids))[-1].argmax()))
        text = ids[len(body["prompt"]) :]
        rows = whole_logprobs(model, "float32", tuple(ids))[len(body["prompt"]) - 1 : -1]
        return {"choices": [{"logprobs": _form(text, rows, text)}]}

    _Server.answers |= {"echo": echo, "free": free}
    with CompletionsServer(server) as open_server:
        golden = record_server(tiny_config(model), open_server, WANTED)
    assert all(asked["model"] == "served" for asked in _Server.asked)
    assert golden.top == 8
    compared = compare(golden, record(tiny_config(model), WANTED))
    assert compared.judgement.verdict is Verdict.SAME, compared.judgement
    assert compared.all_positions.largest < 1e-5
    assert all(case.flip is None for case in compared.cases)


def _echoed(**changes: Any) -> dict[str, Any]:
    """A right echo of the nine tokens, but for the changes."""
    right = {"tokens": None, "token_logprobs": [None, *[-1.0] * 8], "top_logprobs": [None, *[{"a": -1.0}] * 8]}
    return {"choices": [{"logprobs": {**right, **changes}}]}


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"models": {"data": []}}, "lists no model. Pass --server-model"),
        ({"echo": lambda body: {"choices": [{"text": "x"}]}}, "gives no logprobs with its completions"),
        (
            {
                "echo": lambda body: {"choices": [{"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [{}]}}]},
                "free": lambda body: {
                    "choices": [{"logprobs": {"tokens": [], "token_logprobs": [], "top_logprobs": []}}]
                },
            },
            "gives no logprobs of prompts: 0 of 8 positions came with echo",
        ),
        ({"status": 503}, "answers 503"),
        ({"status": 400, "models": "at most 20 logprobs"}, "answers 400: .*20 logprobs.* pass as many by --top"),
        ({"echo": lambda body: [1]}, "gives no logprobs with its completions"),
        (
            {
                "echo": lambda body: {
                    "choices": [
                        {"logprobs": {"token_logprobs": ["a"] * 9, "top_logprobs": [None, *[["b"]] * 8]}},
                    ]
                },
                "free": lambda body: {"choices": [{"logprobs": _form([], np.zeros((0, 1)), [])}]},
            },
            r"answers with other logprobs than OpenAI's completions have: token_logprobs have 'a', expected a number",
        ),
        (
            {
                "echo": lambda body: _echoed(tokens=[f"other {token}" for token in body["prompt"]]),
                "free": lambda body: {"choices": [{"logprobs": _form([], np.zeros((0, 1)), [])}]},
            },
            r"echoes other tokens than it was asked about: 9 of 9 of prompt 'a', the first 'other 83' where .* has 'S'",
        ),
        (
            {"echo": lambda body: _echoed(tokens=["a"])},
            "completions have: 1 tokens, 9 token_logprobs and 9 top_logprobs",
        ),
        (
            {
                "echo": lambda body: _echoed(),
                "free": lambda body: {
                    "choices": [{"logprobs": {"tokens": ["a"], "token_logprobs": [None], "top_logprobs": [{}]}}]
                },
            },
            "leaves out logprobs or texts of tokens that it chose",
        ),
        (
            {
                "echo": lambda body: {
                    "choices": [
                        {"logprobs": {"token_logprobs": [float("nan")] * 9, "top_logprobs": [{"a": -1.0}] * 9}},
                    ]
                },
                "free": lambda body: {"choices": [{"logprobs": _form([], np.zeros((0, 1)), [])}]},
            },
            "logprobs of 8 of 8 positions are no finite numbers",
        ),
    ],
)
def test_servers_that_do_not_do_are_told_apart(model: Path, server: str, answers: Any, message: str) -> None:
    _Server.answers |= answers
    with CompletionsServer(server) as open_server, pytest.raises(CardanError, match=message):
        record_server(tiny_config(model), open_server, WANTED)


def test_a_server_that_dies_amid_a_record_is_said(model: Path, server: str) -> None:
    def die(body: dict[str, Any]) -> Any:
        raise ConnectionAbortedError

    _Server.answers["free"] = die
    _Server.answers["echo"] = lambda body: {"choices": [{"logprobs": {"token_logprobs": [], "top_logprobs": []}}]}
    with CompletionsServer(server) as open_server, pytest.raises(ServerError, match="cannot be reached"):
        record_server(tiny_config(model), open_server, WANTED)


def test_a_fault_of_our_own_is_not_laid_on_the_server(
    model: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise KeyError("ours")

    _Server.answers |= {
        "echo": lambda body: _echoed(),
        "free": lambda body: {"choices": [{"logprobs": _form([], np.zeros((0, 1)), [])}]},
    }
    monkeypatch.setattr("cardan.accuracy.from_server.rest_of", broken)
    with CompletionsServer(server) as open_server, pytest.raises(KeyError, match="ours"):
        record_server(tiny_config(model), open_server, WANTED)


@pytest.mark.parametrize(
    ("url", "key", "message"),
    [
        (
            "http://127.0.0.1:port",
            None,
            "--from http://127.0.0.1:port is no URL that can be asked: Invalid port: 'port'",
        ),
        ("http://", None, "--from http:// names no host. Pass a URL such as http://host:8000"),
        ("http://127.0.0.1:9", "schlüssel", "--server-api-key holds what is no printable ASCII"),
        ("http://127.0.0.1:9", "one\ntwo", "--server-api-key holds what is no printable ASCII"),
    ],
)
def test_what_no_server_can_be_asked_with_is_refused(url: str, key: str | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompletionsServer(url, api_key=key)


def test_a_server_that_is_not_there(model: Path) -> None:
    with CompletionsServer("http://127.0.0.1:9") as server, pytest.raises(ServerError, match="cannot be reached"):
        record_server(tiny_config(model), server, WANTED)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from", "elsewhere"], "--from must be cardan, transformers or a URL such as http://host:8000, got 'else"),
        (["--server-model", "m"], "--server-model and --server-api-key need --from with a URL"),
        (
            ["--from", "transformers", "--noise-positions", "40", "--whole-layer", "norm"],
            "nor a noise floor nor request parameters, so --whole-layer, --noise-positions has no effect",
        ),
        (["--from", "http://127.0.0.1:9", "--noise-positions", "40"], "so --noise-positions has no effect. Drop it."),
    ],
)
def test_wrong_sources(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["accuracy", "record", "--out", "x", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_command_records_with_transformers(model: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "p.json", tmp_path / "g.cardan"
    prompts.write_text(json.dumps([{"name": "a", "text": "SOME TEXT"}]))
    flags = ["--model", str(model), "--prompts", str(prompts), "--out", str(out)]
    assert app.run(["accuracy", "record", *flags, "--from", "transformers"]) == 0
    assert read_golden(out).fingerprint.source == "transformers"
