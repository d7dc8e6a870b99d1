"""Which configuration a kernel takes: a chip's own, its family's, or the default, and what says so."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

import pytest
import torch

from cardan.errors import UnsupportedError
from cardan_kernels import tuning
from cardan_kernels.chips import CHIPS, COMPILED_FOR, INTERPRETER, assume, chip, chip_of
from cardan_kernels.tuning import choice

CONFIGS = {
    path.name.removesuffix(".json"): json.loads(path.read_text())
    for path in (resources.files("cardan_kernels.tuning") / "configs").iterdir()
}


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Configurations of the test's own."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(choice, "_file", lambda name: found.get(name, {}))
    choice._choose.cache_clear()
    yield found
    choice._choose.cache_clear()


def entry(config: dict[str, int], **when: list[int | None]) -> dict[str, Any]:
    return {"when": when, "config": config}


def test_a_chip_without_numbers_of_its_own_takes_the_default_and_says_so(files: dict[str, Any]) -> None:
    files["default"] = {"ops": {"op": [entry({"block": 64, "num_warps": 4, "num_stages": 2})]}}
    found = tuning.choose("op", "sm_90", {"rows": 3})
    assert (found["block"], found.num_warps, found.num_stages, found.source) == (64, 4, 2, "default")


def test_measured_numbers_go_before_those_of_the_family_and_the_default(files: dict[str, Any]) -> None:
    files["default"] = {"ops": {"op": [entry({"block": 64, "num_warps": 4, "num_stages": 2})]}}
    files["cuda"] = {"ops": {"op": [entry({"block": 128, "num_warps": 8})]}}
    files["sm_90"] = {"measured_on": "H200", "ops": {"op": [entry({"block": 256}, rows=[1, 8])]}}
    small, large = (tuning.choose("op", "sm_90", {"rows": rows}) for rows in (8, 9))
    assert dict(small.values) == {"block": 256, "num_warps": 8, "num_stages": 2}
    assert small.source == "tuned for sm_90 (H200)"
    assert (large["block"], large.source) == (128, "default for cuda")
    assert tuning.choose("op", "gfx942", {"rows": 1})["block"] == 64


def test_the_first_entry_that_fits_is_taken(files: dict[str, Any]) -> None:
    sizes = {"num_warps": 4, "num_stages": 1}
    files["default"] = {
        "ops": {"op": [entry({"block": 1, **sizes}, rows=[None, 4]), entry({"block": 2, **sizes}, rows=[5, None])]}
    }
    assert [tuning.choose("op", "sm_80", {"rows": rows})["block"] for rows in (0, 4, 5, 900)] == [1, 1, 2, 2]
    with pytest.raises(UnsupportedError, match=r"No configuration of kernel 'op' fits .*known are op"):
        tuning.choose("op", "sm_80", {"columns": 1})


def test_every_operation_has_a_whole_default_that_fits_any_shape() -> None:
    assert tuning.known_ops()
    for op in tuning.known_ops():
        last = CONFIGS["default"]["ops"][op][-1]
        assert last["when"] == {}, f"the last entry of {op} must fit every shape"
        for name in COMPILED_FOR:
            assert {"num_warps", "num_stages"} <= set(tuning.choose(op, name, {}).values)


def test_files_are_named_after_chips_or_families_and_say_why_and_where() -> None:
    known = {"default", *CHIPS, *(chip.family for chip in CHIPS.values())}
    for name, content in CONFIGS.items():
        assert name in known
        assert content["about"]
        assert "measured_on" in content


def test_unknown_chips_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"chip must be one of sm_80, .*, got 'sm_10'\. Choose a platform"):
        tuning.choose("op", "sm_10", {})


def test_tensors_say_which_chip_they_are_on() -> None:
    assert chip_of(torch.device("cpu")) == INTERPRETER
    with assume("gfx950"):
        assert chip_of(torch.device("meta")) == "gfx950"
    with pytest.raises(UnsupportedError, match="Kernels take tensors on a GPU, got one on 'meta'"):
        chip_of(torch.device("meta"))
    assert chip("gfx942").float8 is torch.float8_e4m3fnuz
    assert chip("gfx950").float8 is torch.float8_e4m3fn
    assert (chip("gfx942").warp, chip("gfx1100").warp) == (64, 32)
