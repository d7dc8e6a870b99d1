"""``cardan replay``: sends the requests of a crash dump again."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from cyclopts import Parameter

from cardan.cli.terminal import messages, results, show_pairs
from cardan.errors import ConfigError

_FORMAT = 1
_PATHS = ("/generate", "/v1/embeddings")


def replay(
    dump: Path,
    /,
    *,
    base_url: Annotated[str, Parameter(help="Where the server listens.")] = "http://127.0.0.1:30000",
    which: Annotated[
        Literal["running", "all"], Parameter(help="Those that ran at the end, or all in the dump.")
    ] = "all",
    concurrency: Annotated[int, Parameter(help="Requests that are open at the same time.")] = 8,
    api_key: Annotated[str | None, Parameter(help="API key of the server.")] = None,
) -> int:
    """Send the requests of a crash dump to a server again, in the order in which they came.

    Returns 1 when one of them was not answered with status 200.
    """
    if not 1 <= concurrency <= 4096:
        raise ConfigError(f"--concurrency must be between 1 and 4096, got {concurrency}.")
    contents = read_dump(dump)
    entries = [*(contents["finished"] if which == "all" else ()), *contents["running"]]
    entries.sort(key=lambda entry: str(entry["started"]))
    messages().print(
        f"{len(entries)} requests of {contents['model']}, Cardan {contents['version']}, {contents['time']}; "
        f"it ended because: {contents['reason']}",
        markup=False,
        soft_wrap=True,
    )
    outcomes = asyncio.run(_send_all(entries, base_url, concurrency, api_key))
    show_pairs(results(), [(what, str(count)) for what, count in sorted(Counter(outcomes).items())])
    return int(any(outcome != "200" for outcome in outcomes))


def read_dump(path: Path) -> dict[str, Any]:
    """What a crash dump holds.

    Raises:
        ConfigError: it cannot be read, or is none.
    """
    try:
        contents = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}. Name a crash dump.") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} is no crash dump: {error}. Name a file that --crash-dump-folder got.") from error
    if not isinstance(contents, dict) or contents.get("format") != _FORMAT:
        found = contents.get("format") if isinstance(contents, dict) else None
        raise ConfigError(
            f"{path} is no crash dump of format {_FORMAT}, got {found!r}. Replay it with its own version."
        )
    lacking = {"running", "finished", "model", "version", "time", "reason"} - contents.keys()
    if lacking or not all(
        isinstance(entry, dict)
        and isinstance(entry.get("body"), dict)
        and "started" in entry
        and entry.get("path") in _PATHS
        for part in ("running", "finished")
        for entry in contents[part]
    ):
        raise ConfigError(f"{path} is a damaged crash dump: requests or fields are missing.")
    return contents


async def _send_all(entries: list[dict[str, Any]], base_url: str, concurrency: int, api_key: str | None) -> list[str]:
    try:
        import httpx
    except ImportError:
        raise ConfigError("Sending requests needs httpx. Run: pip install 'cardan[bench]'") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    room = asyncio.Semaphore(concurrency)
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=None, trust_env=False) as client:

        async def send(entry: dict[str, Any]) -> str:
            async with room:
                try:
                    return str((await client.post(entry["path"], json=entry["body"])).status_code)
                except httpx.HTTPError as error:
                    return f"no answer ({type(error).__name__})"

        return list(await asyncio.gather(*(send(entry) for entry in entries)))
