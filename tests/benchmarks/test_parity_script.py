"""The comparison's arithmetic: foreign load, speeds, and the page written from results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def test_busy_time_leaves_idle_and_waiting_out(load_module: Any) -> None:
    module = load_module("foreign_load")
    stat = "cpu  100 20 30 4000 500 6 7 8 9 10\ncpu0 1 2 3\n"
    assert module.busy_s(stat) == (100 + 20 + 30 + 6 + 7 + 8) / module.TICKS_PER_S


def test_our_own_children_are_not_foreign(load_module: Any) -> None:
    module = load_module("foreign_load")
    before = module.own_s()
    subprocess.run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.35: pass"], check=True)
    assert module.own_s() - before >= 0.3  # times are kept in hundredths of a second, rounded down


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


def test_a_section_is_written_between_its_marks(
    load_module: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = load_module("performance_page")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- x:begin -->\nold\n<!-- x:end -->\nafter\n")
    monkeypatch.setattr(module, "PAGE", page)
    module.write_section("x", "new\n")
    assert page.read_text() == "before\n<!-- x:begin -->\nnew\n<!-- x:end -->\nafter\n"


def test_the_comparison_is_rendered(load_module: Any) -> None:
    module = load_module("transformers_parity")
    median = {"ttft_s": 0.5, "output_tokens_per_s": 42.25, "decode_tokens_per_s": 50.0, "clean_runs": 5}
    text = module.render(
        {
            "model": "m",
            "weights": "w",
            "kernels": "k",
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
                },
                "8": {
                    "cardan": {**median, "discarded_runs": 0},
                    "transformers": {**median, "output_tokens_per_s": 21.125, "discarded_runs": 0},
                },
            },
        }
    )
    assert "| 1 | cardan | 0.50 | 42.2 | 50.0 | 5 | 1 | - |" in text
    assert "| 1 | transformers | - | - | - | 0 | 15 | - |" in text
    assert "| 8 | cardan | 0.50 | 42.2 | 50.0 | 5 | 0 | 2.00 |" in text
    assert "cardan 1.2 s, transformers 2.0 s" in text
    assert "Cardan 1 on k" in text


def test_scheduling_is_rendered(load_module: Any) -> None:
    module = load_module("scheduling")
    times = {"rows": 256, "plan_us": 150.2, "commit_us": 60.4, "total_us": 210.6, "p99_us": 300.0}
    prefix = {"cached_tokens": 15360, "prompt_tokens": 17408, "ttft_ms": {"mean": 2000.0}}
    text = module.render(
        {
            "model": "m",
            "machine": "x",
            "cardan": "1",
            "date": "2030-01-01",
            "scheduler": [times],
            "shared_prefix": {"cached": prefix, "uncached": {**prefix, "ttft_ms": {"mean": 7000.0}}},
        }
    )
    assert "| 256 | 150 | 60 | 211 | 300 |" in text
    assert "15360 of 17408" in text
    assert "| ratio | 3.50 |" in text


@pytest.mark.parametrize("name", ["transformers", "scheduling", "peers", "profiles"])
def test_the_real_page_has_the_marks(load_module: Any, name: str) -> None:
    text = load_module("performance_page").PAGE.read_text()
    assert text.count(f"<!-- {name}:begin -->\n") == text.count(f"<!-- {name}:end -->") == 1
