"""The comparison's arithmetic: foreign load, speeds, and the page written from results."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def load_module() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module
    finally:
        sys.path.remove(str(FOLDER))


def test_busy_time_leaves_idle_and_waiting_out(load_module: Any) -> None:
    module = load_module("foreign_load")
    stat = "cpu  100 20 30 4000 500 6 7 8 9 10\ncpu0 1 2 3\n"
    assert module.busy_s(stat) == (100 + 20 + 30 + 6 + 7 + 8) / module.TICKS_PER_S


def test_our_own_children_are_not_foreign(load_module: Any) -> None:
    module = load_module("foreign_load")
    before = module.own_s()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"], check=True)
    assert module.own_s() - before >= 0.3


def test_speeds(load_module: Any) -> None:
    module = load_module("transformers_parity")
    assert module.speeds({"ttft_s": 1.0, "e2e_s": 3.0}, 2) == {
        "ttft_s": 1.0,
        "output_tokens_per_s": pytest.approx(256 / 3),
        "decode_tokens_per_s": 127.0,
    }


def test_medians_count_what_was_discarded(load_module: Any) -> None:
    module = load_module("transformers_parity")
    runs = module.Runs([{"x": 1.0}, {"x": 5.0}, {"x": 2.0}], 4)
    assert runs.medians() == {"x": 2.0, "clean_runs": 3, "discarded_runs": 4}
    assert not runs.enough
    assert module.Runs([], 2).medians() == {"clean_runs": 0, "discarded_runs": 2}


def test_the_page_is_written_between_its_marks(
    load_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_module("transformers_parity")
    page = tmp_path / "page.md"
    page.write_text(f"before\n{module.MARKS[0]}old\n{module.MARKS[1]}\nafter\n")
    monkeypatch.setattr(module, "PAGE", page)
    median = {"ttft_s": 0.5, "output_tokens_per_s": 42.25, "decode_tokens_per_s": 50.0, "clean_runs": 5}
    module.write_page(
        {
            "model": "m",
            "weights": "w",
            "machine": "x",
            "cardan": "1",
            "torch": "2",
            "transformers": "3",
            "date": "2030-01-01",
            "start_s": {"cardan": 1.25, "transformers": 2.0},
            "batches": {
                "1": {
                    "cardan": {**median, "discarded_runs": 1},
                    "transformers": {"clean_runs": 0, "discarded_runs": 15},
                }
            },
        }
    )
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| 1 | cardan | 0.50 | 42.2 | 50.0 | 5 | 1 |" in text
    assert "| 1 | transformers | - | - | - | 0 | 15 |" in text
    assert "cardan 1.2 s, transformers 2.0 s" in text


def test_the_real_page_has_the_marks(load_module: Any) -> None:
    module = load_module("transformers_parity")
    text = module.PAGE.read_text()
    assert all(text.count(mark) == 1 for mark in module.MARKS)
