"""Plans and platforms as plain tables and JSON values.

It draws nothing: the CLI renders the tables, the server sends the JSON.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cardan.errors import PlatformError
from cardan.platform.api import OptionSpec, Platform
from cardan.platform.capabilities import Capabilities
from cardan.platform.discovery import PlatformStatus
from cardan.platform.plan import Plan
from cardan.plugins import describe_error


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One line of a plan.

    Attributes:
        name: of the setting.
        value: as text.
        source: where it came from.
        why: the reason.
    """

    name: str
    value: str
    source: str
    why: str


@dataclass(frozen=True, slots=True)
class PlatformRow:
    """One line of the list of platforms.

    Attributes:
        name: of the platform.
        origin: distribution and version.
        state: ``usable``, ``not here`` or ``broken``.
        score: what ``auto`` compares, or None.
        reason: why it can run, what is missing, or the error.
        devices: one text per device.
    """

    name: str
    origin: str
    state: str
    score: int | None
    reason: str
    devices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CapabilityRow:
    """One answer of a platform.

    Attributes:
        feature: the feature.
        support: ``native``, ``emulated`` or ``unsupported``.
        evidence: how that was verified.
        reason: why, and what works instead.
    """

    feature: str
    support: str
    evidence: str
    reason: str


def format_bytes(count: int) -> str:
    """A number of bytes for people: ``97.3 MiB``."""
    size, sign = float(abs(count)), "-" if count < 0 else ""
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{sign}{size:.0f} B" if unit == "B" else f"{sign}{size:.1f} {unit}"
        size /= 1024
    return f"{sign}{size:.2f} GiB"


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """A plan as values that any JSON encoder takes."""
    model = asdict(plan.model)
    model["layers"] = len(plan.model.layers)
    model["weight_formats"] = dict(plan.model.weight_formats)
    return {
        "platform": plan.platform,
        "device": asdict(plan.device),
        "model": model,
        "settings": {
            name: {"value": setting.value, "source": setting.source.value, "why": setting.why}
            for name, setting in plan.settings.items()
        },
        "formats": [asdict(item) for item in plan.formats],
        "platform_options": dict(plan.platform_options),
        "notes": list(plan.notes),
        "memory": [{"what": what, "bytes": count, "why": why} for what, count, why in plan.memory],
    }


def platform_rows(statuses: tuple[PlatformStatus, ...]) -> tuple[PlatformRow, ...]:
    """The installed platforms and how each stands on this machine."""
    return tuple(_platform_row(status) for status in statuses)


def _platform_row(status: PlatformStatus) -> PlatformRow:
    plugin, availability = status.plugin, status.availability
    if status.error is not None or status.platform is None or availability is None:
        reason = str(status.error or PlatformError("not probed"))
        return PlatformRow(plugin.name, plugin.origin, "broken", None, reason)
    if not availability.usable:
        return PlatformRow(plugin.name, plugin.origin, "not here", availability.score, availability.reason)
    devices, error = _devices(status.platform)
    if error is not None:
        return PlatformRow(plugin.name, plugin.origin, "broken", availability.score, error)
    return PlatformRow(plugin.name, plugin.origin, "usable", availability.score, availability.reason, devices)


def _devices(platform: Platform) -> tuple[tuple[str, ...], str | None]:
    try:
        devices = platform.devices()
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; the table shows it
        return (), f"listing its devices failed: {describe_error(error)}"
    return tuple(
        _describe_device(device.index, device.name, device.detail, device.total_memory) for device in devices
    ), None


def _describe_device(index: int, name: str, detail: str, total_memory: int | None) -> str:
    parts = [part for part in (detail, format_bytes(total_memory) if total_memory is not None else "") if part]
    return f"{index}: {name}" + (f" ({', '.join(parts)})" if parts else "")


def capability_rows(capabilities: Capabilities) -> tuple[CapabilityRow, ...]:
    """All answers of a platform for one device, families together."""
    return tuple(
        CapabilityRow(
            str(name),
            answer.support.value,
            answer.evidence.value,
            answer.reason + (f"; instead: {answer.alternative}" if answer.alternative else ""),
        )
        for name, answer in sorted(capabilities.features.items(), key=lambda item: str(item[0]))
    )


def option_rows(options: tuple[OptionSpec, ...]) -> tuple[PlanRow, ...]:
    """A platform's own flags: name, default, kind, help."""
    return tuple(
        PlanRow(
            option.name,
            str(option.default),
            " | ".join(str(choice) for choice in option.choices) or option.kind.__name__,
            option.help,
        )
        for option in options
    )
