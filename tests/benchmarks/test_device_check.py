"""The check of a GPU: its arithmetic, its refusals, how wheels travel, and all of its host code on the stand-in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

FOLDER = Path(__file__).parents[2] / "benchmarks"


def answers(*rows: tuple[list[int], float]) -> dict[str, Any]:
    entries = [[SimpleNamespace(top=((1, 0.0), (2, -margin)))] * len(tokens) for tokens, margin in rows]
    return {"tokens": [tokens for tokens, _ in rows], "logprobs": entries}


def test_rows_may_part_only_where_two_tokens_are_close(load_module: Any) -> None:
    compare = load_module("device_engine").compare
    want = answers(([1, 2, 3], 1.0), ([4, 5, 6], 0.001))
    assert compare(want, want) == {"rows": 2, "equal": 2, "parted": [], "passed": True}
    close = compare(want, answers(([1, 2, 3], 1.0), ([4, 9, 9], 1.0)))
    assert close == {"rows": 2, "equal": 1, "parted": [{"row": 1, "step": 1, "margin": 0.001}], "passed": True}
    assert not compare(want, answers(([1, 9, 3], 1.0), ([4, 5, 6], 1.0)))["passed"]


def test_parts_share_the_time_that_is_left(load_module: Any) -> None:
    module = load_module("device_parts")
    clock = module.Clock.of(100)
    part = clock.part(0.2)
    assert 19 < part.left_s <= 20
    part.check()
    with pytest.raises(module.OutOfTimeError):
        module.Clock.of(-1).check()
    check = load_module("device_check")
    assert (check.QUICK_S, check.WHOLE_S) <= (180, 480)
    assert check.WHOLE_S <= 480


def test_wheels_are_fetched_for_the_other_python_and_leave_out_what_the_image_has(
    load_module: Any, tmp_path: Path
) -> None:
    module = load_module("device_check")
    download, wheel = module.collect(tmp_path, "3.12")
    assert download[download.index("--python-version") + 1] == "3.12"
    assert "--only-binary=:all:" in download
    assert any(word.startswith("msgspec") for word in download)
    assert not [word for word in download if word.startswith(module.GIVEN)]
    assert wheel[-1] == str(FOLDER.parent)
    for name in ("msgspec-1-cp312.whl", "torch-2.11-cp312.whl", "numpy-2-cp312.whl"):
        (tmp_path / name).touch()
    command = module.install(tmp_path, tmp_path / "here")
    assert "--no-index" in command
    assert [Path(word).name for word in command if word.endswith(".whl")] == ["msgspec-1-cp312.whl"]


def test_the_file_is_named_for_the_gpu(load_module: Any) -> None:
    assert load_module("device_check").file_name("NVIDIA H200, sm_90, 132 units") == "gpu-nvidia-h200.json"


def test_without_a_gpu_it_says_what_is_missing_and_what_was_proven(
    load_module: Any, monkeypatch: Any, capsys: Any, tmp_path: Path
) -> None:
    module = load_module("device_check")
    monkeypatch.setattr("cardan_torch.gpu.platform.lacking", lambda *_: "no such GPU")
    assert module.main(["--quick", "--folder", str(tmp_path)]) == module.REFUSED
    shown = capsys.readouterr().err
    assert "no such GPU" in shown
    assert "What was proven without a GPU" in shown
    assert not list(tmp_path.iterdir())


def test_what_the_stand_in_gives_is_not_written_among_evidence(load_module: Any, capsys: Any) -> None:
    assert load_module("device_check").main(["--emulated"]) == 2
    assert "Name another place with --folder" in capsys.readouterr().err


def test_the_stand_in_has_its_kernels_interpreted_without_being_told(load_module: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.delenv("TRITON_INTERPRET")
    assert load_module("device_check").main(["--emulated"]) == 2
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_a_part_that_breaks_is_part_of_the_report_and_the_others_are_kept(
    load_module: Any, monkeypatch: Any, tmp_path: Path, capsys: Any
) -> None:
    module = load_module("device_check")

    def breaks(flags: Any, clock: Any) -> dict[str, Any]:
        raise RuntimeError("device-side assert")

    monkeypatch.setitem(module.PARTS, "waits", (breaks, 0.2))
    assert module.main(["--emulated", "--folder", str(tmp_path), "--parts", "waits", "kernels"]) == 1
    (file,) = tmp_path.iterdir()
    report = json.loads(file.read_text())
    assert report["parts"]["waits"]["error"] == "RuntimeError: device-side assert"
    assert report["parts"]["kernels"]["left_out"] == "kernels are timed on a GPU only"
    assert report["machine"]["emulated"]
    shown = capsys.readouterr().out
    assert "waits        FAILED" in shown
    assert str(file) in shown


def test_made_up_weights_repeat_drawn_values_under_every_shape(load_module: Any) -> None:
    module = load_module("device_parts")
    store = module._TiledStore({"a.weight": (300, 200), "norm.weight": (7,)}, 1)
    view = store.tensor("a.weight")
    assert (view.dtype, view.shape, len(view.data)) == ("BF16", (300, 200), 2 * 300 * 200)
    assert bytes(store.tensor("norm.weight").data) == 7 * b"\x00\x00\x80\x3f"
    assert store.info() == {"a.weight": ("BF16", (300, 200)), "norm.weight": ("F32", (7,))}


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_all_of_its_host_code_runs_on_the_stand_in(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "device_check.py"), "--emulated", "--folder", str(tmp_path)]
    command += ["--seconds", "1200", "--parts", "waits", "parity", "kernels", "throughput"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (file,) = tmp_path.iterdir()
    parts = json.loads(file.read_text())["parts"]
    assert parts["waits"]["decode_steps"] > 0
    assert parts["parity"]["tiny, weights made up"]["graph_against_cpu"]["passed"]
    assert parts["throughput"]["tiny"]["cardan"]["graph_replays"] > 0
