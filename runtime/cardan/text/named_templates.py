"""Chat templates that ``--chat-template`` names: those that come with Cardan, or files.

It does not compile them, so that processes which render no chat need not load Jinja.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from cardan.errors import ConfigError


def builtin_templates() -> list[str]:
    """Names that ``--chat-template`` knows."""
    folder = resources.files("cardan.text") / "templates"
    return sorted(entry.name.removesuffix(".jinja") for entry in folder.iterdir() if entry.name.endswith(".jinja"))


def read_chat_template(name_or_path: str) -> str:
    """The template that ``--chat-template`` names: a built-in one, or a file.

    Raises:
        ConfigError: there is neither, or the file cannot be read.
    """
    if name_or_path in builtin_templates():
        return (resources.files("cardan.text") / "templates" / f"{name_or_path}.jinja").read_text(encoding="utf-8")
    path = Path(name_or_path)
    if not path.is_file():
        raise ConfigError(
            f"--chat-template {name_or_path!r} is neither a file nor one of {', '.join(builtin_templates())}."
        )
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {name_or_path!r} cannot be read: {error}. Pass a UTF-8 file.") from error
