"""What an installed plugin that does not load, is for another API, or has a taken name makes of a start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cardan.platform import PLATFORM_API


def make_plugin(folder: Path, distribution: str, version: str, entry_point: str, source: str) -> Path:
    """A distribution as a wheel leaves it: a module and its metadata."""
    name, module = entry_point.split(" = ")
    (folder / f"{module.partition(':')[0]}.py").write_text(source)
    metadata = folder / f"{distribution.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[cardan.platforms]\n{name} = {module}\n")
    return folder


def start(environment: Any, folder: Path, model: Path, name: str) -> Any:
    return environment.run(
        "cardan", "plan", "--platform", name, "--model", str(model), "--random-weights", "0", more_paths=(folder,)
    )


def test_a_plugin_that_does_not_load_ends_the_start(environment: Any, tiny_model: Path, tmp_path: Path) -> None:
    folder = make_plugin(tmp_path, "broken-cardan", "0.3", "broken = broken_vendor:platform", "import no_such_driver\n")
    done = start(environment, folder, tiny_model, "broken")
    assert done.returncode == 1
    for part in ("'broken'", "broken-cardan 0.3", "ModuleNotFoundError", "no_such_driver", "Repair or uninstall"):
        assert part in done.stderr
    # others are not disturbed, and the list shows it
    assert start(environment, folder, tiny_model, "acme").returncode == 0
    listed = environment.run("cardan", "platforms", more_paths=(folder,)).stdout
    assert "broken-cardan 0.3" in listed
    assert "no_such_driver" in listed


def test_a_plugin_for_another_api_names_both_versions(environment: Any, tiny_model: Path, tmp_path: Path) -> None:
    source = (
        "from acme_cardan import AcmePlatform\n"
        "class Later(AcmePlatform):\n"
        "    name = 'later'\n"
        f"    api_range = ({PLATFORM_API + 6}, {PLATFORM_API + 8})\n"
        "platform = Later()\n"
    )
    folder = make_plugin(tmp_path, "later-cardan", "9.0", "later = later_vendor:platform", source)
    done = start(environment, folder, tiny_model, "later")
    assert done.returncode == 1
    for part in ("later-cardan 9.0", f"{PLATFORM_API + 6} to {PLATFORM_API + 8}", f"this Cardan has {PLATFORM_API}"):
        assert part in done.stderr


def test_two_plugins_of_one_name_are_both_named(environment: Any, tiny_model: Path, tmp_path: Path) -> None:
    source = "from acme_cardan import platform\n"
    folder = make_plugin(tmp_path, "other-acme", "2.1", "acme = other_acme:platform", source)
    done = start(environment, folder, tiny_model, "acme")
    assert done.returncode == 1
    for part in ("acme-cardan 1.0.0", "other-acme 2.1", "uninstall one of them"):
        assert part in done.stderr


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("platform = 7\n", "an object of type int"),
        ("from acme_cardan import AcmePlatform as platform\n", "the class AcmePlatform"),
        ("from acme_cardan import platform\n", "calls itself 'acme', expected 'odd'"),
    ],
)
def test_an_entry_point_to_something_else_says_what_it_got(
    environment: Any, tiny_model: Path, tmp_path: Path, source: str, message: str
) -> None:
    folder = make_plugin(tmp_path, "odd-cardan", "1.0", "odd = odd_vendor:platform", source)
    done = start(environment, folder, tiny_model, "odd")
    assert done.returncode == 1
    assert message in done.stderr
