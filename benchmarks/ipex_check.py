"""Tries attention by Intel's extension for torch (IPEX 2.8, its last release) in an environment of its own.

It sets that environment up once (about 1 GB to download, 2 GB on disk), runs the conformance suite with
``--attention-backend ipex``, compares times with torch's own attention and with the native kernels, and writes what
passed and the times to docs/platforms/ipex.md. It ends with 0, with 1 where a check failed, and with 3 where IPEX
cannot be had: it says why.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from foreign_load import ForeignLoad
from ipex_libraries import make_empty_libraries, missing_tools
from performance_page import machine

from cardan.config import cache_dir

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "platforms" / "ipex.md"
VERIFIED = ("<!-- verified:begin -->\n", "<!-- verified:end -->")
MARKS = ("<!-- measured:begin -->\n", "<!-- measured:end -->")
FAILED, CANNOT = 1, 3
STAMP = "complete"
CHECKOUT = "checkout"
"""A file in the environment that names the checkout of Cardan that it has."""
PACKAGES = ("torch==2.8.0", "intel-extension-for-pytorch==2.8.0")
BESIDE = ("filelock", "fsspec", "jinja2", "networkx", "numpy", "packaging", "psutil", "sympy", "typing-extensions")
"""What the two import; asking pip for what torch requires would bring CUDA, 3 GB."""
PIP = ("-m", "pip", "install", "-qq", "--disable-pip-version-check")
PYTHONS = range(11, 14)
FREE_GB = 5
ROUNDS = 3
MOST_FOREIGN = 0.2
"""Cores that others may take while times are evidence."""
ELSEWHERE = (
    "On Linux on x86_64 with AVX2 and Python 3.11 to 3.13, and a package index that has torch 2.8 and IPEX 2.8, "
    "run make test-ipex again."
)


class CannotBeHadError(Exception):
    """Why IPEX cannot be tried on this machine, for people."""


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", type=Path, default=cache_dir() / "ipex", help="where the environment goes")
    parser.add_argument("--only", action="append", default=[], help="a part of the suite; all by default")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="how often each is timed; 0 leaves that out")
    flags = parser.parse_args()
    try:
        check_machine(flags.folder)
        python = set_up(flags.folder)
        release = isa_of(python)
        say(f"IPEX {release}")
    except CannotBeHadError as error:
        sys.stderr.write(f"IPEX cannot be tried here: {error}\n{ELSEWHERE}\n")
        return CANNOT
    counted = conform(python, flags.only)
    if counted is None:
        return FAILED
    if not flags.only:
        write(render_verified(counted, release), VERIFIED)
    if flags.rounds:
        found = measure(python, flags.rounds)
        section = render(found)
        say(section)
        if found["foreign_cores"] > MOST_FOREIGN:
            say(f"That is no evidence, so {PAGE.name} stays as it is. Run it where nothing else runs.")
        else:
            write(section, MARKS)
    return 0


def say(text: str) -> None:
    """Show a line at once, before what a program that is started next says."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def check_machine(folder: Path, cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Look at what can be seen before anything is fetched.

    Raises:
        CannotBeHadError: another system, processor or Python, or no room.
    """
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise CannotBeHadError(
            f"its packages are for Linux on x86_64, and here is {sys.platform} {platform.machine()}."
        )
    if python_minor() not in PYTHONS:
        raise CannotBeHadError(f"its packages are for Python 3.11 to 3.13, and here is {platform.python_version()}.")
    if "avx2" not in cpuinfo.read_text(encoding="utf-8").split():
        raise CannotBeHadError("it needs a processor with AVX2, which this one does not say it has.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder.parent).free / 1e9
    if not is_complete(folder) and free < FREE_GB:
        raise CannotBeHadError(
            f"its environment needs {FREE_GB} GB while it is made, and {folder.parent} has {free:.1f}."
        )


def python_minor() -> int:
    """The second number of this Python's version."""
    return sys.version_info.minor


def recipe() -> str:
    """Changes when other packages are wanted, also by Cardan itself, so that the environment is made again."""
    wanted = " ".join((*PACKAGES, *BESIDE, platform.python_version())).encode()
    return hashlib.sha256(wanted + (ROOT / "pyproject.toml").read_bytes()).hexdigest()[:16]


def is_complete(folder: Path) -> bool:
    """Whether the environment was made to its end, by this recipe."""
    stamp = folder / STAMP
    return stamp.is_file() and stamp.read_text(encoding="utf-8") == recipe()


def set_up(folder: Path) -> str:
    """Make the environment unless it is complete, and have this checkout of Cardan in it; returns its Python.

    Raises:
        CannotBeHadError: pip did not get the packages, or the two do not start.
    """
    if not is_complete(folder):
        try:
            make(folder)
        except (OSError, subprocess.CalledProcessError, StopIteration) as error:
            said = (getattr(error, "stderr", None) or "").strip().splitlines()[-3:]
            raise CannotBeHadError(
                f"making {folder} failed with {type(error).__name__}: {' / '.join((str(error), *said))}."
            ) from error
    python = str(folder / "bin" / "python")
    checkout = folder / CHECKOUT
    if not checkout.is_file() or checkout.read_text(encoding="utf-8") != str(ROOT):
        run("installing Cardan", python, *PIP, "--no-deps", "-e", str(ROOT))
        checkout.write_text(str(ROOT), encoding="utf-8")
    return python


def make(folder: Path) -> None:
    """Make the environment, and stamp it.

    Raises:
        CannotBeHadError: pip did not get the packages, or the two do not start.
        OSError: a program is missing, or a file cannot be written.
        subprocess.CalledProcessError: an empty library cannot be made.
        StopIteration: torch has no folder of libraries.
    """
    python = str(folder / "bin" / "python")
    say(f"Making {folder}: {' and '.join(PACKAGES)}, about 1 GB ...")
    shutil.rmtree(folder, ignore_errors=True)
    run("making an environment", sys.executable, "-m", "venv", str(folder))
    run("fetching the packages", python, *PIP, "--no-deps", *PACKAGES)
    run("fetching what they import", python, *PIP, *BESIDE)
    run("installing Cardan", python, *PIP, "-e", str(ROOT))
    (folder / CHECKOUT).write_text(str(ROOT), encoding="utf-8")
    start_torch(python, folder)
    (folder / STAMP).write_text(recipe(), encoding="utf-8")


def start_torch(python: str, folder: Path) -> None:
    """Have torch start without CUDA.

    Raises:
        CannotBeHadError: it does not.
    """
    command = [python, "-c", "import torch"]
    started = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet())
    if started.returncode == 0:
        return
    if missing_tools():
        raise CannotBeHadError(
            f"PyPI's torch 2.8 is built for CUDA, whose libraries are not here, and {', '.join(missing_tools())}, to "
            "make empty ones in their place, is missing. Install a C compiler with binutils."
        )
    made = make_empty_libraries(next((folder / "lib").glob("python3*/site-packages/torch/lib")))
    say(f"PyPI's torch 2.8 is built for CUDA: {len(made)} empty libraries stand in for CUDA's, 3 GB.")
    run("starting torch", python, "-c", "import torch; assert not torch.cuda.is_available()")


def isa_of(python: str) -> str:
    """IPEX's version and the instruction set that it chooses on this processor.

    Raises:
        CannotBeHadError: it cannot be imported.
    """
    code = "import intel_extension_for_pytorch as i; print(i.__version__, 'with', i._C._get_current_isa_level())"
    return run("importing IPEX", python, "-c", code).splitlines()[-1]


def run(what: str, *command: str) -> str:
    """What a command printed.

    Raises:
        CannotBeHadError: it failed; with the last of what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=quiet())
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()[-3:]
        raise CannotBeHadError(f"{what} failed with {done.returncode}: {' / '.join(said) or 'it said nothing'}.")
    return done.stdout


def quiet() -> dict[str, str]:
    """The environment without what would bring another torch, and without IPEX's notices of what it replaces."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    return {**kept, "TORCH_CPP_LOG_LEVEL": "ERROR", "PYTHONWARNINGS": "ignore"}


def conform(python: str, only: Sequence[str]) -> dict[str, int] | None:
    """How many checks passed and were skipped; None where one failed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counted.json"
        command = [python, str(ROOT / "benchmarks/ipex_conform.py"), str(file), *only]
        if subprocess.run(command, env=quiet(), check=False).returncode:
            return None
        counted: dict[str, int] = json.loads(file.read_text(encoding="utf-8"))
    return counted


def render_verified(counted: Mapping[str, int], release: str) -> str:
    """The part of the page on what passed."""
    passed, skipped = counted["passed"], counted["skipped"]
    where = f"{datetime.now(UTC):%Y-%m-%d}, {machine()}, IPEX {release}"
    return f"{where}: {passed} checks of the suite passed, none failed, {skipped} were skipped.\n"


def measure(python: str, rounds: int) -> dict[str, Any]:
    """The least milliseconds of each kind of step, by each kind of attention, in turn."""
    ways = {
        "ipex": (python, ("--platform-option", "kernels=torch", "--attention-backend", "ipex")),
        "torch": (python, ("--platform-option", "kernels=torch", "--attention-backend", "torch")),
        "native": (sys.executable, ("--platform-option", "kernels=native")),
    }
    best: dict[str, dict[str, float]] = {way: {} for way in ways}
    load = ForeignLoad()
    load.start()
    for _ in range(rounds):
        for way, (interpreter, flags) in ways.items():
            for kind, ms in steps_of(interpreter, flags).items():
                best[way][kind] = min(ms, best[way].get(kind, ms))
    return {"machine": machine(), "foreign_cores": load.stop(), "rounds": rounds, "ms": best}


def steps_of(python: str, flags: tuple[str, ...]) -> dict[str, float]:
    """Milliseconds of each kind of step, by ``cardan bench profile``."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "profile.json"
        command = [str(Path(python).with_name("cardan")), "bench", "profile", "--platform", "cpu", *flags]
        sizes = ["--dtype", "float32", "--context-length", "1024", "--max-total-tokens", "8192", "--prompt-len", "512"]
        native = python == sys.executable
        done = subprocess.run(
            [*command, *sizes, "--steps", "16", "--rows", "1", "--rows", "8", "--output-json", str(file)],
            env=dict(os.environ) if native else quiet(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.stderr.write(done.stderr)
            done.check_returncode()
        profiles = json.loads(file.read_text(encoding="utf-8"))["profiles"]
    return {kind_of(one): one["untimed_us"] / 1000 for one in profiles}


def kind_of(one: dict[str, Any]) -> str:
    """A step in words."""
    return f"prefill of {one['tokens']}" if one["kind"] == "prefill" else f"decode of {one['rows']}"


def render(found: dict[str, Any]) -> str:
    """The measured part of the page."""
    ms = found["ms"]
    lines = [
        f"{found['machine']}, {datetime.now(UTC):%Y-%m-%d}; SmolLM2-135M (Q4_1) in float32, milliseconds a step, the "
        f"least of {found['rounds']} runs in turn, while others took {found['foreign_cores']:.2f} cores:",
        "",
        "| step | torch, attention `ipex` | torch, attention `torch` | native kernels | torch / ipex | native / ipex |",
        "|---|---|---|---|---|---|",
    ]
    for kind in ms["ipex"]:
        ipex, torch, native = (ms[way][kind] for way in ("ipex", "torch", "native"))
        lines.append(f"| {kind} | {ipex:.1f} | {torch:.1f} | {native:.1f} | {torch / ipex:.2f} | {native / ipex:.2f} |")
    return "\n".join([*lines, "", "A ratio above 1 says that `ipex` is faster.", ""])


def write(section: str, marks: tuple[str, str], page: Path = PAGE) -> None:
    """Put a part between two marks of the page."""
    text = page.read_text(encoding="utf-8")
    head, rest = text.split(marks[0])
    page.write_text(head + marks[0] + section + marks[1] + rest.split(marks[1])[1], encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
