"""A fresh environment with Cardan's wheel and the vendors' wheels, as a stranger would install them."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest

from cardan.testing import write_tiny_model

ROOT = Path(__file__).parents[2]
DISTRIBUTIONS = (ROOT, ROOT / "examples" / "vendor_platform", ROOT / "examples" / "vendor_device")


@dataclass(frozen=True)
class Environment:
    """A virtual environment that has wheels installed and the tests' own dependencies on its path."""

    folder: Path
    cache: Path

    def variables(self, *more_paths: Path) -> dict[str, str]:
        """The environment of its commands; ``more_paths`` hold further plugins."""
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("CARDAN_", "PYTHON"))}
        return {
            **kept,
            "CARDAN_CACHE": str(self.cache),
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(str(path) for path in more_paths),
        }

    def run(
        self, *command: str, more_paths: tuple[Path, ...] = (), timeout_s: float = 240
    ) -> subprocess.CompletedProcess:
        """Run one of the environment's programs."""
        program, *rest = command
        return subprocess.run(
            [str(self.folder / "bin" / program), *rest],
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
            cwd=self.cache,
            env=self.variables(*more_paths),
        )


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """Built once: three wheels, one environment."""
    wheels = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(wheels)]
    subprocess.run([*build, *map(str, DISTRIBUTIONS)], check=True)
    folder = tmp_path_factory.mktemp("environment") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    python = folder / "bin" / "python"
    install = ["--python", str(python), "install", "--no-deps", "--no-index"]
    subprocess.run([*pip, *install, *map(str, wheels.glob("*.whl"))], check=True)
    # dependencies come from the environment that runs the tests; its own .pth files, editable installs among them,
    # are not followed from there
    site = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return Environment(folder, tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with config and tokenizer; weights are made up."""
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context_length=256)
