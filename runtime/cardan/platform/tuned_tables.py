"""Tables of what ``cardan tune`` measured: kept as one JSON file for each platform and processor, and read at a start.

It measures nothing and knows no platform by name. A table that does not fit is never used, and it is said why.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cardan.errors import ConfigError
from cardan.platform.api import Platform
from cardan.platform.device import DeviceInfo
from cardan.platform.plan import Plan, Setting, SettingSource
from cardan.platform.tuning import Tuner

FOLDER = "tuning"
"""Where tables are, below the cache folder."""

LAYOUT = 1
"""Of the files; another one is not read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningTable:
    """What was measured.

    Attributes:
        platform: name of the platform.
        processor: that it was measured on, as ``Tuner.processor`` says.
        kernels: that were measured, as ``Tuner.kernels`` says.
        date: of the last measurement, ``2026-11-30``.
        numbers: values by name.
    """

    platform: str
    processor: str
    kernels: str
    date: str
    numbers: Mapping[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What a start takes its numbers from.

    Attributes:
        platform: the platform, with the numbers of the table where there is one.
        table: the table, or None for the platform's own numbers.
        setting: for the plan: which table, and why.
        refused: a table that is there and is not used, with the reason; empty where there is none.
    """

    platform: Platform
    table: TuningTable | None
    setting: Setting
    refused: str = ""

    def shown_in(self, plan: Plan) -> Plan:
        """The plan with the setting ``tuning``, and with a note where a table is not used."""
        plan = plan.with_setting("tuning", self.setting.value, self.setting.source, self.setting.why)
        return plan.with_notes(self.refused) if self.refused else plan


def tuned_platform(platform: Platform, device: DeviceInfo, cache: Path) -> Tuning:
    """The platform as it starts on a device: with the table that was measured there, if there is one that fits.

    Args:
        platform: as its options configured it.
        device: that will be opened.
        cache: the cache folder.
    """
    tuner = platform.tuner(device)
    if tuner is None:
        nothing = Setting(None, SettingSource.PLATFORM, "the platform offers nothing to tune")
        return Tuning(platform=platform, table=None, setting=nothing)
    table, refused = find_table(platform.name, tuner, cache)
    if table is None:
        why = refused or f"`cardan tune --platform {platform.name}` was not run for {tuner.processor}"
        setting = Setting("default", SettingSource.DEFAULT, why)
        return Tuning(platform=platform, table=None, setting=setting, refused=refused)
    why = f"tuned on {table.date} for {table.processor}, {table.kernels}"
    setting = Setting("tuned", SettingSource.MEASURED, why)
    return Tuning(platform=platform.tuned(table.numbers), table=table, setting=setting)


def table_path(platform: str, processor: str, cache: Path) -> Path:
    """Where the table of a processor is kept."""
    plain = re.sub(r"[^A-Za-z0-9]+", "-", processor).strip("-").lower()[:60]
    unique = hashlib.sha256(processor.encode()).hexdigest()[:8]
    return cache / FOLDER / platform / f"{plain}-{unique}.json"


def find_table(platform: str, tuner: Tuner, cache: Path) -> tuple[TuningTable | None, str]:
    """The table for what a tuner measures, or None and why a table that is there is not used, if there is one."""
    path = table_path(platform, tuner.processor, cache)
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None, _tables_of_others(platform, tuner, path)
    except OSError as error:
        return None, _refusal(path, platform, f"it cannot be read ({error.strerror or error})")
    table, wrong = _parse(raw)
    wrong = wrong or _misfit(table, platform, tuner)
    return (None, _refusal(path, platform, wrong)) if wrong else (table, "")


def write_table(table: TuningTable, cache: Path) -> Path:
    """Keep a table, in place of an older one for the same processor; returns where.

    Raises:
        ConfigError: the cache folder cannot be written.
    """
    path = table_path(table.platform, table.processor, cache)
    text = json.dumps({"layout": LAYOUT, **asdict(table)}, indent=2, sort_keys=True) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.with_suffix(".new")
        whole.write_text(text, encoding="utf-8")
        whole.replace(path)
    except OSError as error:
        raise ConfigError(
            f"The table cannot be kept in {path.parent}: {error.strerror or error}. "
            "Set CARDAN_CACHE to a folder that can be written."
        ) from error
    return path


def _parse(raw: bytes) -> tuple[TuningTable | None, str]:
    """A table from its file, or None and what is wrong with it."""
    try:
        found: Any = json.loads(raw)
    except (ValueError, RecursionError):
        return None, "it is no JSON, or nested too deeply"
    if not isinstance(found, dict) or found.get("layout") != LAYOUT:
        return None, f"it is no table of layout {LAYOUT}"
    texts: dict[str, Any] = {name: found.get(name) for name in ("platform", "processor", "kernels", "date")}
    wrong = [name for name, value in texts.items() if not isinstance(value, str)]
    numbers: Any = found.get("numbers")
    if not isinstance(numbers, dict) or not all(type(value) is int for value in numbers.values()):
        wrong.append("numbers")
    if wrong:
        return None, f"{', '.join(wrong)} must be there, texts and whole numbers, and are not"
    return TuningTable(**texts, numbers=numbers), ""


def _misfit(table: TuningTable | None, platform: str, tuner: Tuner) -> str:
    """Why a table does not hold for what a tuner measures; empty where it does."""
    assert table is not None
    for what, got, expected in (
        ("platform", table.platform, platform),
        ("processor", table.processor, tuner.processor),
        ("kernels", table.kernels, tuner.kernels),
    ):
        if got != expected:
            return f"it was measured for {what} {got}, and here is {expected}"
    tunables = {tunable.name: tunable for tunable in tuner.tunables()}
    for name, value in table.numbers.items():
        known = tunables.get(name)
        if known is None:
            return f"the platform has no number {name}"
        if not known.least <= value <= known.most:
            return f"{name} must be between {known.least} and {known.most}, and is {value}"
    return ""


def _refusal(path: Path, platform: str, reason: str) -> str:
    return f"the table {path} is not used: {reason}. Run `cardan tune --platform {platform}` to measure anew"


def _tables_of_others(platform: str, tuner: Tuner, path: Path) -> str:
    """What to say where there are tables, but of other processors; empty where there is none."""
    others: list[str] = []
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(path.parent.glob("*.json"))
    for other in paths:
        with contextlib.suppress(OSError):
            table, _ = _parse(other.read_bytes())
            others += [table.processor] if table is not None else []
    if not others:
        return ""
    return (
        f"tables in {path.parent} are not used: they were measured for {'; '.join(others)}, and here is "
        f"{tuner.processor}. Run `cardan tune --platform {platform}` to measure here"
    )
