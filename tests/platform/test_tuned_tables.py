"""Tables of what was tuned: which one a start takes, and what it says where one is there and does not fit."""

from __future__ import annotations

import errno
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tuned_platforms import FakeTuner, TunedNull

from cardan.errors import ConfigError
from cardan.platform import SettingSource
from cardan.platform.tuned_tables import Tuning, TuningTable, table_path, tuned_platform, write_table

TABLE = TuningTable(
    platform="null", processor="Some CPU (2 threads)", kernels="k1", date="2026-11-30", numbers={"few": 6}
)
HINT = "Run `cardan tune --platform null` to measure"


def start(cache: Path, tuner: FakeTuner | None = None) -> tuple[Tuning, dict[str, int]]:
    """What a start takes, and the numbers that the platform got."""
    platform = TunedNull(tuner or FakeTuner({}))
    found = tuned_platform(platform, platform.devices()[0], cache)
    assert isinstance(found.platform, TunedNull)
    return found, dict(found.platform.numbers)


def write(cache: Path, **changes: Any) -> Path:
    """The table with some fields changed, under the name of the one that fits."""
    path = table_path("null", TABLE.processor, cache)
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = {"layout": 1, "platform": "null", "processor": TABLE.processor, "kernels": "k1", "date": "2026-11-30"}
    path.write_text(json.dumps({**whole, "numbers": {"few": 6}, **changes}))
    return path


def test_a_platform_without_a_tuner_says_so(tmp_path: Path) -> None:
    platform = TunedNull(None)
    found = tuned_platform(platform, platform.devices()[0], tmp_path)
    assert found.platform is platform
    assert (found.setting.value, found.setting.source) == (None, SettingSource.PLATFORM)
    assert found.setting.why == "the platform offers nothing to tune"


def test_without_a_table_the_defaults_hold_and_the_plan_says_how_to_tune(tmp_path: Path) -> None:
    found, numbers = start(tmp_path)
    assert numbers == {}
    assert (found.setting.value, found.setting.source, found.refused) == ("default", SettingSource.DEFAULT, "")
    assert found.setting.why == "`cardan tune --platform null` was not run for Some CPU (2 threads)"


def test_a_table_that_fits_is_taken_with_its_date_and_processor(tmp_path: Path) -> None:
    write_table(TABLE, tmp_path)
    found, numbers = start(tmp_path)
    assert numbers == {"few": 6}
    assert (found.setting.value, found.setting.source) == ("tuned", SettingSource.MEASURED)
    assert found.setting.why == "tuned on 2026-11-30 for Some CPU (2 threads), k1"
    assert found.table == TABLE


def test_a_new_table_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    first = write_table(TABLE, tmp_path)
    second = write_table(replace(TABLE, numbers={"few": 2, "many": 9}), tmp_path)
    assert first == second
    assert start(tmp_path)[1] == {"few": 2, "many": 9}
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_a_table_of_another_processor_is_not_used_and_named(tmp_path: Path) -> None:
    write_table(TABLE, tmp_path)
    found, numbers = start(tmp_path, FakeTuner({}, processor="Another CPU"))
    assert numbers == {}
    assert found.setting.value == "default"
    assert "were measured for Some CPU (2 threads), and here is Another CPU. " + HINT in found.refused
    assert found.setting.why == found.refused


def test_each_processor_has_a_table_of_its_own(tmp_path: Path) -> None:
    write_table(TABLE, tmp_path)
    write_table(replace(TABLE, processor="Another CPU", numbers={"few": 1}), tmp_path)
    assert start(tmp_path)[1] == {"few": 6}
    assert start(tmp_path, FakeTuner({}, processor="Another CPU"))[1] == {"few": 1}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kernels": "k0"}, "it was measured for kernels k0, and here is k1"),
        ({"processor": "Another CPU"}, "it was measured for processor Another CPU, and here is Some CPU (2 threads)"),
        ({"platform": "cpu"}, "it was measured for platform cpu, and here is null"),
        ({"layout": 2}, "it is no table of layout 1"),
        ({"date": None}, "date must be there, texts and whole numbers, and are not"),
        ({"numbers": [4]}, "numbers must be there"),
        ({"numbers": {"few": 4.5}}, "numbers must be there"),
        ({"numbers": {"few": True}}, "numbers must be there"),
        ({"numbers": {"gone": 4}}, "the platform has no number gone"),
        ({"numbers": {"few": 65}}, "few must be between 0 and 64, and is 65"),
        ({"numbers": {"many": 0}}, "many must be between 1 and 1024, and is 0"),
    ],
)
def test_a_table_that_does_not_fit_is_not_used_and_says_why(
    tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = write(tmp_path, **changes)
    found, numbers = start(tmp_path)
    assert numbers == {}
    assert found.setting.value == "default"
    assert re.fullmatch(
        rf"the table {re.escape(str(path))} is not used: {re.escape(reason)}.*\. {HINT} anew", found.refused
    ), found.refused


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe", b"[1, 2]", b'"x"', b"null", b"[" * 200_000])
def test_a_damaged_file_is_not_used(tmp_path: Path, raw: bytes) -> None:
    write(tmp_path).write_bytes(raw)
    found, numbers = start(tmp_path)
    assert numbers == {}
    assert "is not used: it is no " in found.refused


def test_a_file_that_cannot_be_read_is_not_used(tmp_path: Path) -> None:
    table_path("null", TABLE.processor, tmp_path).mkdir(parents=True)
    assert "is not used: it cannot be read (Is a directory). " in start(tmp_path)[0].refused


def test_a_cache_folder_that_cannot_be_searched_stops_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(TABLE, tmp_path)

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for name in ("read_bytes", "exists", "stat", "glob"):
        monkeypatch.setattr(Path, name, refuse)
    found, numbers = start(tmp_path)
    assert numbers == {}
    assert found.setting.value == "default"
    assert "is not used: it cannot be read (Permission denied). " in found.refused


def test_tables_of_others_that_cannot_be_listed_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, pattern: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "glob", refuse)
    assert start(tmp_path)[0].refused == ""


def test_damaged_tables_of_others_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path).write_bytes(b"{")
    found, _ = start(tmp_path, FakeTuner({}, processor="Another CPU"))
    assert found.refused == ""


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be kept in .*/file/.*: Not a directory\. Set CARDAN_CACHE to a"):
        write_table(TABLE, tmp_path / "file")
