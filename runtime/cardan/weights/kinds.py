"""What a file is, told by its first bytes and never by its name.

It opens nothing that it recognizes: pickles above all are never loaded.
"""

from __future__ import annotations

import enum
from pathlib import Path

from cardan.errors import CheckpointError

PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
"""Names that weights inside a pickle usually have."""

CONVERT_PICKLE = (
    "Loading a pickle can run any code, so Cardan never does. Convert it to safetensors: "
    "load it once where you trust it and call save_pretrained(folder, safe_serialization=True)."
)


class FileKind(enum.StrEnum):
    """Kinds of files that are told apart; the value is how messages call them."""

    GGUF = "a GGUF file"
    SAFETENSORS = "a safetensors file"
    ZIP = "a zip archive, as PyTorch pickles are"
    PICKLE = "a Python pickle"
    OLD_GGML = "a GGML file older than GGUF"
    HDF5 = "an HDF5 file"
    LFS = "a Git LFS pointer"
    HTML = "an HTML page"
    JSON = "JSON text"
    EMPTY = "empty"
    UNKNOWN = "of an unknown kind"


_ADVICE = {
    FileKind.ZIP: CONVERT_PICKLE,
    FileKind.PICKLE: CONVERT_PICKLE,
    FileKind.OLD_GGML: "Convert the original model to GGUF again.",
    FileKind.HDF5: "Convert it to safetensors.",
    FileKind.LFS: "Run `git lfs pull` in its repository to get the real file.",
    FileKind.HTML: "The download got a web page instead of the file; fetch it again.",
    FileKind.EMPTY: "Fetch it again.",
}

_MAGIC = (
    (b"GGUF", FileKind.GGUF),
    (b"PK\x03\x04", FileKind.ZIP),
    (b"\x89HDF", FileKind.HDF5),
    (b"version https://git-lfs", FileKind.LFS),
    (b"tjgg", FileKind.OLD_GGML),
    (b"lmgg", FileKind.OLD_GGML),
    (b"fmgg", FileKind.OLD_GGML),
)


def file_kind(path: Path) -> FileKind:
    """Tell what a file is.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with path.open("rb") as file:
            head = file.read(64)
            size = path.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}.") from error
    return _kind_of(head, size)


def _kind_of(head: bytes, size: int) -> FileKind:
    if not head:
        return FileKind.EMPTY
    for magic, kind in _MAGIC:
        if head.startswith(magic):
            return kind
    if len(head) > 8 and head[8:9] == b"{" and 2 <= int.from_bytes(head[:8], "little") <= size - 8:
        return FileKind.SAFETENSORS
    if head[0] == 0x80 and 2 <= head[1] <= 5 if len(head) > 1 else False:
        return FileKind.PICKLE
    text = head.lstrip().lower()
    if text.startswith((b"<!doctype", b"<html")):
        return FileKind.HTML
    return FileKind.JSON if text.startswith((b"{", b"[")) else FileKind.UNKNOWN


def check_kind(path: Path, expected: FileKind) -> None:
    """Make sure that a file is what its name says.

    A file of unknown kind passes: its reader then says where it stops making sense.

    Raises:
        CheckpointError: it is something else, and what.
    """
    found = file_kind(path)
    if found in (expected, FileKind.UNKNOWN):
        return
    if found in (FileKind.GGUF, FileKind.SAFETENSORS):
        suffix = ".gguf" if found is FileKind.GGUF else ".safetensors"
        advice = f"Rename it to end in {suffix}."
    else:
        advice = _ADVICE.get(found, "Fetch it again.")
    raise CheckpointError(f"{path} should be {expected.value}, but it is {found.value}. {advice}")
