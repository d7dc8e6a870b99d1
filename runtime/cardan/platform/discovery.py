"""Finds the installed platform plugins, loads the one that is asked for, and chooses one for ``auto``.

It knows no platform by name and opens no device. Names come from package metadata; only a platform that is
needed is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from cardan.errors import PlatformApiError, PlatformError, PlatformLoadError, PlatformNotFoundError
from cardan.platform.api import OLDEST_PLATFORM_API, PLATFORM_API, Availability, Platform
from cardan.platform.capabilities import Support
from cardan.platform.refusals import parse_options
from cardan.plugins import EntryPointLike, Plugin, describe_error, installed, load_guarded

GROUP = "cardan.platforms"
"""Entry-point group of platform plugins."""

AUTO = "auto"
"""The name that stands for: choose for me."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PlatformStatus:
    """How one installed platform plugin stands on this machine.

    Attributes:
        plugin: name and distribution.
        platform: the loaded platform, or None when loading failed.
        availability: its probe, or None when there is none.
        error: why it cannot be used at all, or None.
    """

    plugin: Plugin
    platform: Platform | None = None
    availability: Availability | None = None
    error: PlatformError | None = None


def find_plugins(entry_points: Iterable[EntryPointLike] | None = None) -> tuple[Plugin, ...]:
    """All installed platform plugins, sorted by name; none of them is imported."""
    return installed(GROUP, entry_points)


def load_platform(name: str, entry_points: Iterable[EntryPointLike] | None = None) -> Platform:
    """Load the platform called ``name``, importing no other.

    Raises:
        PlatformNotFoundError: no plugin of that name is installed.
        PlatformLoadError: two plugins have that name, it fails to load, or it is not a ``Platform``.
        PlatformApiError: it was written for another ``PLATFORM_API``.
    """
    plugins = find_plugins(entry_points)
    named = [plugin for plugin in plugins if plugin.name == name]
    if not named:
        known = ", ".join(dict.fromkeys(plugin.name for plugin in plugins)) or "none"
        raise PlatformNotFoundError(
            f"No platform plugin is named {name!r}. Installed: {known}. "
            "Pass --platform with one of them, or install the package that brings it."
        )
    _refuse_duplicates(named)
    return _load(named[0])


def survey(entry_points: Iterable[EntryPointLike] | None = None) -> tuple[PlatformStatus, ...]:
    """Load and probe every installed platform; failures are part of the answer."""
    plugins = find_plugins(entry_points)
    return tuple(_status(plugin, [other for other in plugins if other.name == plugin.name]) for plugin in plugins)


def platforms_claiming(
    formats: Iterable[str], but: str, entry_points: Iterable[EntryPointLike] | None = None
) -> dict[str, tuple[str, ...]]:
    """For each weight format, the installed platforms that take it as it is, for messages that refuse one.

    Args:
        formats: weight formats.
        but: a platform that is left out.
        entry_points: taken instead of those installed.
    """
    claims: dict[str, tuple[str, ...]] = dict.fromkeys(formats, ())
    for status in survey(entry_points):
        if status.platform is None or status.plugin.name == but or not _chosen_by_auto(status):
            continue
        for device in status.platform.devices()[:1]:
            capabilities = status.platform.capabilities(device)
            for fmt, names in claims.items():
                if capabilities.get(f"weights:{fmt}").support is Support.NATIVE:
                    claims[fmt] = (*names, status.plugin.name)
    return claims


def choose_platform(
    name: str = AUTO,
    entry_points: Iterable[EntryPointLike] | None = None,
    *,
    options: Iterable[str] = (),
    trial: bool = False,
) -> Platform:
    """The platform called ``name``, or for ``auto`` the one whose probe scores highest.

    Args:
        name: of a platform, or ``auto``.
        entry_points: taken instead of those installed.
        options: the platform's own as ``name=value``, on which it may depend whether it can run.
        trial: the platform is to be tried, so that a refusal also says what was proven without its hardware.

    Raises:
        PlatformNotFoundError: it is not installed or cannot run here; for ``auto``, none can.
        ConfigError: an option is wrong.
        PlatformLoadError: it fails to load, two plugins have its name, or ``auto`` meets a tie.
        PlatformApiError: it was written for another ``PLATFORM_API``.
    """
    if name == AUTO:
        return _choose_best(survey(entry_points))
    platform = load_platform(name, entry_points)
    given = tuple(options)
    asked = platform.configured(parse_options(given, platform.options(), name)) if given else platform
    availability = _probe(asked, name)
    if not availability.usable:
        raise PlatformNotFoundError(
            f"Platform {name!r} cannot run on this machine: {availability.reason}. "
            "`cardan platforms` shows what can; pass --platform with one of those."
            + (f"\n{availability.proven}" if trial and availability.proven else "")
        )
    return platform


def _choose_best(statuses: tuple[PlatformStatus, ...]) -> Platform:
    for status in statuses:
        if status.error is not None:
            logger.warning("platform plugin left out of the choice: %s", status.error)
    scored = [
        (status.availability.score, status.platform)
        for status in statuses
        if status.platform and status.availability and _chosen_by_auto(status)
    ]
    if not scored:
        raise PlatformNotFoundError(
            "No installed platform can be chosen on this machine.\n"
            + "\n".join(f"  {status.plugin.name} ({status.plugin.origin}): {_reason(status)}" for status in statuses)
            + "\nInstall one that fits (pip install 'cardan[cpu]'), or name one with --platform."
        )
    best = max(score for score, _ in scored)
    winners = [platform for score, platform in scored if score == best]
    if len(winners) > 1:
        names = " and ".join(repr(platform.name) for platform in winners)
        raise PlatformLoadError(
            f"Platforms {names} both score {best}, so auto cannot choose. Pass --platform with one of them."
        )
    return winners[0]


def _chosen_by_auto(status: PlatformStatus) -> bool:
    return status.availability is not None and status.availability.usable and status.availability.score > 0


def _reason(status: PlatformStatus) -> str:
    if status.error is not None:
        return str(status.error)
    if status.availability is None:
        return "not probed"
    suffix = " (only when named)" if status.availability.usable and status.availability.score <= 0 else ""
    return status.availability.reason + suffix


def _status(plugin: Plugin, named: list[Plugin]) -> PlatformStatus:
    try:
        _refuse_duplicates(named)
        platform = _load(plugin)
        return PlatformStatus(plugin, platform, _probe(platform, plugin.name))
    except PlatformError as error:
        return PlatformStatus(plugin, error=error)


def _refuse_duplicates(named: list[Plugin]) -> None:
    if len(named) > 1:
        origins = " and ".join(plugin.origin for plugin in named)
        raise PlatformLoadError(
            f"Platform {named[0].name!r} is provided by {origins}. Names must be unique: uninstall one of them."
        )


def _load(plugin: Plugin) -> Platform:
    loaded = load_guarded(plugin)
    where = f"Platform {plugin.name!r} ({plugin.origin}, {plugin.entry_point.value})"
    if loaded.error is not None:
        raise PlatformLoadError(
            f"{where} failed to load: {describe_error(loaded.error)}. Repair or uninstall {plugin.distribution}."
        ) from loaded.error
    platform = loaded.value
    if not isinstance(platform, Platform):
        got = (
            f"the class {platform.__name__}"
            if isinstance(platform, type)
            else f"an object of type {type(platform).__name__}"
        )
        raise PlatformLoadError(
            f"{where} must be an instance of cardan.platform.Platform, got {got}. Point the entry point at an instance."
        )
    if platform.name != plugin.name:
        raise PlatformLoadError(
            f"{where} calls itself {platform.name!r}, expected {plugin.name!r}. "
            "The entry point and Platform.name must agree."
        )
    _check_api(platform, plugin)
    return platform


def _check_api(platform: Platform, plugin: Plugin) -> None:
    oldest, newest = platform.api_range
    if OLDEST_PLATFORM_API <= newest < PLATFORM_API:
        logger.warning(
            "Platform %r (%s) was written for PLATFORM_API %d, this Cardan has %d. It still runs; install a newer "
            "release of %s before the next version.",
            plugin.name,
            plugin.origin,
            newest,
            PLATFORM_API,
            plugin.distribution,
        )
        return
    if not oldest <= PLATFORM_API <= newest:
        wanted = str(oldest) if oldest == newest else f"{oldest} to {newest}"
        other = "newer" if newest < PLATFORM_API else "older"
        raise PlatformApiError(
            f"Platform {plugin.name!r} ({plugin.origin}) was written for PLATFORM_API {wanted}, this Cardan has "
            f"{PLATFORM_API}. Install a release of {plugin.distribution} that is {other}, or another Cardan."
        )


def _probe(platform: Platform, name: str) -> Availability:
    try:
        return platform.probe()
    except (Exception, SystemExit) as error:
        raise PlatformLoadError(
            f"Platform {name!r} failed while it was probed: {describe_error(error)}. "
            "A probe must report what is missing and must not raise: tell the plugin's maker."
        ) from error
