"""Fixtures that every test folder may use; where torch is not installed, tests that need it are skipped."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from cardan.errors import ConfigError, PlatformError

# Triton's kernels run in its interpreter wherever tests import them; they are made for it, or not, when imported.
os.environ.setdefault("TRITON_INTERPRET", "1")

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def models_folder() -> Path | None:
    """The folder named by CARDAN_TEST_MODELS, or None."""
    folder = os.environ.get("CARDAN_TEST_MODELS")
    return Path(folder) if folder else None


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The bundled model's GGUF file; `make test` fetches it and sets CARDAN_TEST_MODELS."""
    folder = models_folder()
    path = folder / SMOLLM2_FILE if folder else None
    if path is None or not path.is_file():
        pytest.skip(f"{SMOLLM2_FILE} is not in CARDAN_TEST_MODELS; `make test` fetches it")
    return path


NEEDS_TORCH = "needs torch, which is not installed here"


def lacks_torch(error: BaseException | None) -> bool:
    """Whether torch was missing: at its import, in what compares with it, or for the platform that runs on it."""
    if isinstance(error, ModuleNotFoundError):
        return error.name == "torch"
    if isinstance(error, ImportError):
        return "install torch" in str(error)
    return isinstance(error, PlatformError | ConfigError) and "torch is not installed" in str(error)


class ModuleThatMayNeedTorch(pytest.Module):
    """A file of tests that is skipped, not broken, where its imports lack torch."""

    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        """Its tests."""
        try:
            return super().collect()
        except self.CollectError as error:
            if lacks_torch(error.__cause__):
                pytest.skip(NEEDS_TORCH, allow_module_level=True)
            raise


if find_spec("torch") is None:

    def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
        """Files of tests that may need torch."""
        return ModuleThatMayNeedTorch.from_parent(parent, path=module_path)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
        """Turn a test that found no torch into a skipped one."""
        report = yield
        if call.excinfo is not None and lacks_torch(call.excinfo.value):
            report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {NEEDS_TORCH}")
        return report


@pytest.fixture(autouse=True)
def restored_logging() -> Iterator[None]:
    """Commands that a test runs in this process set the root logger up; give it back."""
    root = logging.getLogger()
    level, handlers = root.level, list(root.handlers)
    yield
    root.setLevel(level)
    root.handlers[:] = handlers
