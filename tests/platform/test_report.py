"""Plans and platforms as tables and JSON."""

from __future__ import annotations

import json
from typing import Any

import plan_examples
import pytest

from cardan.errors import PlatformLoadError
from cardan.platform import (
    Availability,
    Capabilities,
    Capability,
    DeviceInfo,
    Evidence,
    OptionSpec,
    Plan,
    Support,
)
from cardan.platform.discovery import PlatformStatus
from cardan.platform.report import (
    CapabilityRow,
    PlanRow,
    capability_rows,
    format_bytes,
    option_rows,
    plan_to_json,
    platform_rows,
)
from cardan.plugins import Plugin


@pytest.fixture(scope="module")
def plan() -> Plan:
    return plan_examples.plan(facts=plan_examples.model(weight_formats={"Q4_1": 2}))


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (-(2**21), "-2.0 MiB"),
        (3 * 2**30, "3.00 GiB"),
        (2**41, "2048.00 GiB"),
    ],
)
def test_format_bytes(count: int, text: str) -> None:
    assert format_bytes(count) == text


def test_the_json_has_every_part_and_only_plain_values(plan: Plan) -> None:
    value = plan_to_json(plan)
    assert json.loads(json.dumps(value)) == value
    assert set(value) == set(Plan.__dataclass_fields__)
    assert value["settings"]["context_length"] == {
        "value": 4096,
        "source": "model",
        "why": "the longest sequence that the model was made for",
    }
    assert value["model"]["weight_formats"] == {"Q4_1": 2}
    assert value["formats"][0]["native"] is False


class Listed:
    def __init__(self, devices: tuple[DeviceInfo, ...] | Exception) -> None:
        self._devices = devices

    def devices(self) -> tuple[DeviceInfo, ...]:
        if isinstance(self._devices, Exception):
            raise self._devices
        return self._devices


def status(platform: Any, availability: Availability | None, error: Any = None) -> PlatformStatus:
    return PlatformStatus(Plugin("x", "x-dist", "1.0", None), platform, availability, error)  # type: ignore[arg-type]


def test_platform_rows_tell_usable_absent_and_broken_apart() -> None:
    device = DeviceInfo(index=0, name="chip", detail="8 cores", total_memory=2**30)
    rows = platform_rows(
        (
            status(Listed((device,)), Availability(5, "fine")),
            status(Listed(()), Availability(0, "no such device", usable=False)),
            status(None, None, PlatformLoadError("failed to load")),
            status(Listed(OSError("gone")), Availability(5, "fine")),
        )
    )
    assert [row.state for row in rows] == ["usable", "not here", "broken", "broken"]
    assert rows[0].devices == ("0: chip (8 cores, 1.00 GiB)",)
    assert rows[0].origin == "x-dist 1.0"
    assert rows[1].reason == "no such device"
    assert rows[2].reason == "failed to load"
    assert rows[3].reason == "listing its devices failed: OSError: gone"


def test_capability_rows_give_the_alternative() -> None:
    capabilities = Capabilities(
        {
            "overlap": Capability(Support.NATIVE, "streams", Evidence.HARDWARE),
            "graph": Capability(Support.UNSUPPORTED, "no capture", alternative="eager steps"),
        }
    )
    assert capability_rows(capabilities) == (
        CapabilityRow("graph", "unsupported", "none", "no capture; instead: eager steps"),
        CapabilityRow("overlap", "native", "hardware", "streams"),
    )


def test_option_rows() -> None:
    options = (
        OptionSpec(name="threads", kind=int, default=2, help="how many"),
        OptionSpec(name="isa", kind=str, default="best", help="which", choices=("best", "plain")),
    )
    assert option_rows(options) == (
        PlanRow("threads", "2", "int", "how many"),
        PlanRow("isa", "best", "best | plain", "which"),
    )
