"""``cardan accuracy`` from a shell's side: files, exit codes, what is shown, and wrong uses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cardan.accuracy.fingerprints import TensorPrint
from cardan.accuracy.golden import read_golden
from cardan.cli import app
from cardan.errors import ModelError

TEXTS = [
    {"name": "one", "text": "abc def", "decode": 0.5},
    {"name": "two", "text": "a text of some chunks"},
]


def test_record_and_compare(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, golden, numbers, page = (tmp_path / name for name in ("p.json", "g.cardan", "n.json", "n.html"))
    prompts.write_text(json.dumps([{**text, "text": text["text"].upper()} for text in TEXTS]))
    flags = ["--model", str(model), "--platform", "mlx", "--max-total-tokens", "500", "--chunked-prefill-size", "8"]
    asked = [
        "accuracy",
        "record",
        *flags,
        "--out",
        str(golden),
        "--prompts",
        str(prompts),
        "--no-noise",
        "--no-semantics",
    ]
    assert app.run(asked) == 0
    shown = capsys.readouterr().out
    assert "positions of 2 prompts, top 64" in shown
    found = read_golden(golden)
    assert [entry.text for entry in found.cases] == [text["text"].upper() for text in TEXTS]
    assert app.run(["accuracy", "compare", str(golden), str(golden), "--json", str(numbers), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    assert "verdict: same within noise" in shown
    assert shown.index("against") < shown.index("verdict") < shown.index("KL in nats, of the top 64: a lower bound")
    assert json.loads(numbers.read_text())["judgement"]["verdict"] == "same within noise"
    assert page.read_text().startswith("<!doctype html>")
    assert app.run(["accuracy", "compare", str(golden), *flags, "--dtype", "bfloat16", "--no-noise"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("dtype: float32 against bfloat16") < shown.index("verdict")
    assert "noise floor not measured; assumed for float32 and bfloat16" in shown


@pytest.mark.parametrize(
    ("changes", "code", "word"),
    [
        ({}, 0, "same within noise"),
        ({"weights": {"w": TensorPrint("Q8_0", (1,), "b", "b")}}, 3, "drift"),
        ({"tokenizer": "another"}, 4, "different"),
    ],
)
def test_a_verdict_has_an_exit_code(
    changes: dict[str, object], code: int, word: str, recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = recorded(noise=False)
    known = replace(golden.fingerprint, tokenizer="one", weights={"w": TensorPrint("F32", (1,), "a", "a")})
    for name, made in (("a", known), ("b", replace(known, **changes))):
        replace(golden, fingerprint=made).write(tmp_path / name)
    assert app.run(["accuracy", "compare", str(tmp_path / "a"), str(tmp_path / "b")]) == code
    assert f"verdict: {word}" in capsys.readouterr().out


@pytest.mark.slow
def test_a_narrow_type_is_found_to_carry_a_difference(
    model: Path, recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Float32 against bfloat16, judged as if both were float32."""
    golden, numbers, page = (tmp_path / name for name in ("g.cardan", "n.json", "n.html"))
    recorded("cpu").write(golden)
    flags = ["--model", str(model), "--platform", "cpu", "--max-total-tokens", "500", "--dtype", "bfloat16"]
    asked = ["--attribute", "--no-noise", "--no-semantics", "--json", str(numbers), "--html", str(page)]
    assert app.run(["accuracy", "compare", str(golden), *flags, *asked]) == 3
    shown = " ".join(capsys.readouterr().out.split())
    assert "attribution: The difference is carried by activations in bfloat16: where they are float32" in shown
    attribution = json.loads(numbers.read_text())["attribution"]
    assert attribution["feature"] == "activations in bfloat16"
    assert attribution["deviations"] == [], "operations round as their type does"
    assert "What carries the difference" in page.read_text()


def test_a_comparison_is_kept_where_attribution_fails(
    model: Path, recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def attribute(*_: object) -> None:
        raise ModelError("no second engine starts here")

    monkeypatch.setattr("cardan.cli.comparing.attribute", attribute)
    golden, numbers, page = (tmp_path / name for name in ("g.cardan", "n.json", "n.html"))
    recorded(noise=False).write(golden)
    flags = ["--model", str(model), "--platform", "cpu", "--max-total-tokens", "500"]
    asked = ["--attribute", "--no-noise", "--no-semantics", "--json", str(numbers), "--html", str(page)]
    assert app.run(["accuracy", "compare", str(golden), *flags, *asked]) == 1
    said = capsys.readouterr()
    assert "verdict: same within noise" in said.out
    assert "no second engine starts here" in said.err
    assert json.loads(numbers.read_text())["judgement"]["verdict"] == "same within noise"
    assert page.exists()


def test_a_verdict_is_shown_even_if_it_cannot_be_kept(
    recorded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "n.json")

    golden = tmp_path / "g.cardan"
    recorded(noise=False).write(golden)
    monkeypatch.setattr(Path, "write_text", full)
    asked = ["accuracy", "compare", str(golden), str(golden), "--json", str(tmp_path / "n.json")]
    assert app.run(asked) == 2
    said = capsys.readouterr()
    assert "verdict: same within noise" in said.out
    assert "n.json cannot be written: No space left on device" in " ".join(said.err.split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["compare", "{golden}", "{golden}", "--platform", "mlx"], 2, "without an engine, so --platform has no effect"),
        (["compare", "{golden}", "{golden}", "--no-noise"], 2, "so --no-noise has no effect"),
        (["compare", "{folder}/absent"], 1, "There is no file"),
        (["compare", "{golden}", "{golden}", "--noise-positions", "240"], 2, "so --noise-positions has no effect"),
        (["compare", "{golden}", "--no-noise", "--noise-positions", "40"], 2, "With --no-noise, --noise-positions has"),
        (["compare", "{golden}", "--json", "{golden}"], 2, "g.cardan, which is read. Name another file."),
        (["compare", "{golden}", "{golden}", "--html", "{folder}/./g.cardan"], 2, "g.cardan, which is read."),
        (["compare", "{golden}", "--json", "{folder}/a", "--html", "{folder}/a"], 2, "over what --json writes. Name"),
        (["eval", "--against", "{golden}", "--out", "{golden}"], 2, "g.cardan, which is read. Name another file."),
        (["record", "--out", "x", "--top", "0"], 2, "--top must be between 1 and 128, got 0"),
        (["record", "--out", "x", "--no-noise", "--noise-positions", "9"], 2, "With --no-noise, --noise-positions has"),
    ],
)
def test_wrong_uses_say_what_to_do(
    arguments: list[str], code: int, message: str, recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    golden = tmp_path / "g.cardan"
    recorded(noise=False).write(golden)
    given = [text.format(golden=golden, folder=tmp_path) for text in arguments]
    assert app.run(["accuracy", *given]) == code
    assert message in " ".join(capsys.readouterr().err.split())
