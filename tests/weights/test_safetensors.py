"""The safetensors reader against the safetensors package, and against files that are damaged on purpose."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cardan.config import ModelConfig
from cardan.errors import CheckpointError
from cardan.quantization import dequantize
from cardan.weights import OpenedCheckpoint, open_checkpoint
from cardan.weights import safetensors as module
from cardan.weights.safetensors import INDEX_NAME, SafetensorsStore

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def test_every_type_is_read_as_the_safetensors_package_wrote_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = {name: (torch.randn(3, 5) * 3).to(kind) for name, kind in DTYPES.items()}
    values |= {"scalar": torch.tensor(2.5), "empty": torch.zeros(0, 4)}
    save_file(values, tmp_path / "x.safetensors", metadata={"format": "pt"})
    store = SafetensorsStore([tmp_path / "x.safetensors"])
    assert store.info().keys() == values.keys()
    assert store.info()["BF16"] == ("BF16", (3, 5))
    for name, value in values.items():
        view = store.tensor(name)
        assert view.shape == tuple(value.shape)
        np.testing.assert_array_equal(dequantize(view), value.float().numpy(), err_msg=name)
    store.close()


def pack(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw) if length is None else length) + raw + data)
    return path


def entry(start: int, end: int, shape: list[Any] | None = None, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": [(end - start) // 4] if shape is None else shape, "data_offsets": [start, end]}


A = entry(0, 8)

DAMAGED: dict[str, tuple[dict[str, Any], str]] = {
    "header beyond the file": ({"header": {}, "length": 500}, "its header of 500 bytes does not fit in 10"),
    "absurd header": ({"header": {}, "length": 2**63}, "its header of 9223372036854775808 bytes does not fit"),
    "no JSON": ({"header": b"{'a': 1}"}, "its header is no valid JSON: Expecting property name"),
    "no UTF-8": ({"header": b'{"\xff": 1}'}, "its header is no valid JSON: 'utf-8' codec"),
    "deep JSON": ({"header": b'{"a":' + b"[" * 200_000}, "its header is no valid JSON"),
    "absurd number": ({"header": b'{"a":' + b"9" * 5000 + b"}"}, "its header is no valid JSON"),
    "no object": ({"header": b"[1, 2]"}, "its header must hold a JSON object, got list"),
    "a name twice": ({"header": b'{"a": 1, "b": 2, "a": 3}'}, "no valid JSON: the key 'a' occurs twice"),
    "entry of another kind": ({"header": {"a": 5}}, "the entry of tensor 'a' is no object"),
    "unknown type": (
        {"header": {"a": entry(0, 8, dtype="F4")}, "data": b"0" * 8},
        "'a' has the type 'F4'; Cardan reads BF16",
    ),
    "type of another kind": ({"header": {"a": entry(0, 8, dtype=["F32"])}}, r"'a' has the type \['F32'\]"),
    "shape of another kind": (
        {"header": {"a": entry(0, 8, shape=[2.0])}},
        r"'a' has the shape \[2.0\] and the offsets",
    ),
    "negative shape": ({"header": {"a": entry(0, 8, shape=[-2])}}, r"'a' has the shape \[-2\]"),
    "no offsets": ({"header": {"a": {"dtype": "F32", "shape": [2]}}}, "the offsets null"),
    "three offsets": ({"header": {"a": {**A, "data_offsets": [0, 1, 2]}}}, r"the offsets \[0, 1, 2\]"),
    "true as an offset": ({"header": {"a": {**A, "data_offsets": [False, 8]}}}, r"the offsets \[false, 8\]"),
    "many dimensions": ({"header": {"a": entry(0, 8, shape=[1] * 33)}}, r"has the shape \[1, 1, .*\.\.\. and"),
    "beyond the file": ({"header": {"a": A}, "data": b"0" * 7}, "tensor 'a' should be at bytes .* but the file has"),
    "end before start": ({"header": {"a": entry(8, 0, shape=[2])}, "data": b"0" * 8}, "tensor 'a' should be at bytes"),
    "wrong product": (
        {"header": {"a": entry(0, 8, shape=[3])}, "data": b"0" * 8},
        r"tensor 'a' has 8 bytes, but F32 of shape \(3,\) takes 12",
    ),
    "absurd product": (
        {"header": {"a": entry(0, 8, shape=[2**62] * 32)}, "data": b"0" * 8},
        "tensor 'a' has 8 bytes, but",
    ),
    "overlap": (
        {"header": {"a": A, "b": entry(4, 12)}, "data": b"0" * 12},
        "tensor 'b' at byte .* overlaps tensor 'a'",
    ),
    "hole": (
        {"header": {"a": A, "b": entry(12, 16)}, "data": b"0" * 16},
        "'b' at byte .* leaves a hole after tensor 'a'",
    ),
    "hole at the start": ({"header": {"a": entry(4, 8)}, "data": b"0" * 8}, "leaves a hole after the header"),
    "more data than tensors": ({"header": {"a": A}, "data": b"0" * 9}, "its tensors end at byte .*, but the file has"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_damaged_file_is_refused_with_the_place(tmp_path: Path, case: str) -> None:
    arguments, message = DAMAGED[case]
    path = pack(tmp_path / "x.safetensors", **arguments)
    with pytest.raises(CheckpointError, match=message) as caught:
        SafetensorsStore([path])
    assert str(path) in str(caught.value)


def test_a_file_shorter_than_a_header_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"abc")
    with pytest.raises(CheckpointError, match="it has 3 bytes, less than a header"):
        SafetensorsStore([path])


def test_an_absurdly_long_header_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_HEADER_BYTES", 20)
    path = pack(tmp_path / "x.safetensors", {"a": A}, b"0" * 8)
    with pytest.raises(CheckpointError, match=r"its header of .* bytes is larger than 20"):
        SafetensorsStore([path])


# --- several files ------------------------------------------------------------------------------


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    folder = tmp_path / "sharded"
    folder.mkdir()
    save_file({"a": torch.ones(2), "b": torch.zeros(3)}, folder / "model-00001-of-00002.safetensors")
    save_file({"c": torch.full((4,), 5.0)}, folder / "model-00002-of-00002.safetensors")
    weight_map = {"a": 1, "b": 1, "c": 2}
    names = {name: f"model-0000{part}-of-00002.safetensors" for name, part in weight_map.items()}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "config.json").write_text("{}")
    return folder


def open_folder(folder: Path) -> OpenedCheckpoint:
    return open_checkpoint(ModelConfig(model=str(folder)))


def change_index(folder: Path, change: dict[str, Any]) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"] |= change
    (folder / INDEX_NAME).write_text(json.dumps(index))


def test_shards_are_one_checkpoint(sharded: Path) -> None:
    checkpoint = open_folder(sharded)
    assert checkpoint.tensor_info() == {"a": ("F32", (2,)), "b": ("F32", (3,)), "c": ("F32", (4,))}
    np.testing.assert_array_equal(checkpoint.dequantize(checkpoint.tensor("c")), np.full(4, 5))


def test_a_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        CheckpointError, match=r"lacks 1 of the 2 files of its index: model-00002-of-00002.safetensors\. Fetch"
    ):
        open_folder(sharded)


def test_a_tensor_that_is_not_in_its_shard_is_named(sharded: Path) -> None:
    change_index(sharded, {"c": "model-00001-of-00002.safetensors"})
    with pytest.raises(
        CheckpointError, match=r"model-00001-of-00002.safetensors has no tensor 'c', which model.safetensors"
    ):
        open_folder(sharded)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/passwd", "", 5, "a/b.safetensors"])
def test_an_index_names_plain_files(sharded: Path, name: Any) -> None:
    change_index(sharded, {"d": name})
    with pytest.raises(CheckpointError, match="is no plain file name, for the tensor 'd'"):
        open_folder(sharded)


@pytest.mark.parametrize("content", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(sharded: Path, content: str) -> None:
    (sharded / INDEX_NAME).write_text(content)
    with pytest.raises(CheckpointError, match=r"index.json has no weight_map\. Fetch it again"):
        open_folder(sharded)


def test_shards_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / INDEX_NAME).unlink()
    with pytest.raises(
        CheckpointError, match=r"has 2 safetensors files \(model-00001.*\) and no model.safetensors.index"
    ):
        open_folder(sharded)


def test_one_shard_is_not_a_model(sharded: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is one of 2 shards\. Pass the folder"):
        open_folder(sharded / "model-00001-of-00002.safetensors")


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file({"t": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"The tensor 't' is in both .*x.safetensors and .*y.safetensors"):
        SafetensorsStore([tmp_path / "x.safetensors", tmp_path / "y.safetensors"])
