"""A record made where one set of platforms can be loaded, compared where another can: processes that lack packages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

WITHOUT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {absent!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Absent())
from cardan.cli.app import run
sys.exit(run(sys.argv[1:]))
"""
TEXTS = [{"name": "one", "text": "ABC DEF", "decode": 0.5}, {"name": "two", "text": "A TEXT OF SOME CHUNKS"}]


def cardan(absent: tuple[str, ...], *arguments: object) -> subprocess.CompletedProcess[str]:
    """A command line in a process for which some packages are not installed."""
    command = [sys.executable, "-c", WITHOUT.format(absent=absent), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.slow
def test_a_record_goes_from_one_installation_to_another(model: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("mlx.core")
    prompts, golden, numbers = (tmp_path / name for name in ("p.json", "g.cardan", "n.json"))
    prompts.write_text(json.dumps(TEXTS))
    flags = ("--model", model, "--max-total-tokens", 500)
    on_mlx = cardan(("mlx", "cardan_mlx"), "accuracy", "record", "--platform", "mlx", *flags, "--out", golden)
    assert on_mlx.returncode == 1
    assert "No module named 'cardan_mlx'" in " ".join(on_mlx.stderr.split())
    made = cardan(
        ("mlx", "cardan_mlx"), "accuracy", "record", "--platform", "cpu", *flags, "--prompts", prompts, "--out", golden
    )
    assert made.returncode == 0, made.stderr
    absent = ("torch", "cardan_native", "cardan_cpu", "transformers")
    on_cpu = cardan(absent, "accuracy", "compare", golden, "--platform", "cpu", *flags)
    assert on_cpu.returncode == 1
    assert "No module named 'cardan_cpu'" in " ".join(on_cpu.stderr.split())
    compared = cardan(absent, "accuracy", "compare", golden, "--platform", "mlx", *flags, "--json", numbers)
    assert compared.returncode == 0, compared.stderr
    found = json.loads(numbers.read_text())
    assert found["judgement"]["verdict"] == "same within noise"
    assert found["judgement"]["band_from"].startswith("measured on both sides: ")
    assert (found["ours"].split()[0], found["theirs"].split()[0]) == ("cpu", "mlx")
