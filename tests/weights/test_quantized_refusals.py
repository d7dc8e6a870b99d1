"""Quantized checkpoints that cannot be read: each fault has a message that names it."""

from __future__ import annotations

import json
from copy import deepcopy

import numpy as np
import pytest
from quantized_checkpoints import METHODS, Raw, save

from cardan.config import ModelConfig
from cardan.errors import CheckpointError
from cardan.weights import open_checkpoint

LINEAR = "model.layers.0.mlp.up_proj"
ROWS, COLUMNS = 64, 256


def one_linear(name):
    weight = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    parts, _ = METHODS[name].quantize(weight, np.random.default_rng(1))
    return {**parts, **METHODS[name].extra}


def opened(folder, config, parts, module=LINEAR):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["X"], "quantization_config": config}))
    save(folder / "model.safetensors", {module + suffix: part for suffix, part in parts.items()})
    return open_checkpoint(ModelConfig(model=str(folder)))


def changed(config, path, value):
    """A config with one field of it, or of a part of it, changed."""
    config = deepcopy(dict(config))
    *parts, last = path.split("/")
    place = config
    for part in parts:
        place = place[part]
    place[last] = value
    return config


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("awq-64", ".scales"),
        ("awq-64", ".qzeros"),
        ("gptq4-32-sym", ".scales"),
        ("gptq4-64-asym", ".qzeros"),
        ("gptq4-act-order", ".g_idx"),
        ("fp8-blocks", ".weight_scale_inv"),
        ("ct-fp8-rows", ".weight_scale"),
        ("ct-int4", ".weight_scale"),
        ("ct-int4", ".weight_shape"),
        ("ct-int4-asym", ".weight_zero_point"),
        ("ct-w8a8", ".weight_scale"),
        ("ct-mxfp4", ".weight_scale"),
        ("mxfp4", ".weight_scales"),
    ],
)
def test_a_missing_part_is_named(tmp_path, name, suffix):
    parts = one_linear(name)
    del parts[suffix]
    where = suffix.lstrip(".").removeprefix("weight") if name == "mxfp4" else suffix
    with pytest.raises(CheckpointError, match=rf"{where} is missing beside .*\. Fetch the checkpoint again"):
        opened(tmp_path / "m", METHODS[name].config, parts)


@pytest.mark.parametrize(
    ("name", "suffix", "shape", "message"),
    [
        ("awq-64", ".scales", (4, 63), r"up_proj.scales has shape \[4, 63\], expected \[4, 64\]"),
        ("awq-64", ".qzeros", (3, 8), r"up_proj.qzeros has shape \[3, 8\], expected \[4, 8\]"),
        ("gptq4-32-sym", ".scales", (4, 64), r"up_proj.scales has shape \[4, 64\], expected \[8, 64\]"),
        ("gptq4-32-sym", ".qzeros", (8, 9), r"up_proj.qzeros has shape \[8, 9\], expected \[8, 8\]"),
        ("gptq4-act-order", ".g_idx", (255,), r"up_proj.g_idx has shape \[255\], expected \[256\]"),
        ("ct-int4", ".weight_scale", (64, 7), r"up_proj.weight_scale has shape \[64, 7\], expected \[64, 8\]"),
        ("ct-int4-asym", ".weight_zero_point", (8, 3), r"weight_zero_point has shape \[8, 3\], expected \[8, 2\]"),
        ("ct-int4-rows", ".weight_scale", (63, 1), r"weight_scale has shape \[63, 1\], expected one scale, or one for"),
        ("ct-w8a8", ".weight_scale", (65, 1), r"weight_scale has shape \[65, 1\], expected one scale, or one for each"),
        ("fp8-blocks", ".weight_scale_inv", (2, 2), r"has shape \[2, 2\], but blocks of \[128, 128\] in a weight of"),
        ("ct-fp8-tensor", ".weight_scale", (2,), r"weight_scale has shape \[2\], expected one scale, or one for each"),
        ("mxfp4", ".weight_blocks", (64, 8, 15), r"has shape \[64, 8, 15\], expected \[..., groups, 16\]"),
        ("mxfp4", ".weight_scales", (64, 7), r"weight_scales has shape \[64, 7\], expected \[64, 8\]"),
        ("ct-mxfp4", ".weight_packed", (64, 100), r"groups of 32 do not divide its rows of 200"),
        ("awq-64", ".qweight", (256,), r"up_proj.qweight has shape \[256\], expected two axes"),
        ("awq-64", ".qweight", (200, 8), r"groups of 64 do not divide its rows of 200. Check that config.json belongs"),
        ("gptq4-64-asym", ".qweight", (32, 60), r"60 zero points of 4 bits do not fill words of 32"),
    ],
)
def test_a_wrong_shape_is_named(tmp_path, name, suffix, shape, message):
    parts = one_linear(name)
    before = parts[suffix]
    dtype = before.bits.dtype if isinstance(before, Raw) else before.dtype
    parts[suffix] = Raw(np.zeros(shape, dtype), before.dtype) if isinstance(before, Raw) else np.zeros(shape, dtype)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "m", METHODS[name].config, parts)


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        (
            "awq-64",
            "quant_method",
            "bitsandbytes",
            r"quant_method is 'bitsandbytes'; Cardan reads awq, compressed-tensors, fp8, gptq, mxfp4.*\. Choose",
        ),
        ("awq-64", "quant_method", None, r"quant_method is None; Cardan reads awq, .* a GGUF file, or one that is not"),
        ("awq-64", "bits", 3, r"quantization_config.bits must be one of 4, got 3. Choose a checkpoint of such a kind"),
        ("awq-64", "version", "gemv", r"quantization_config.version must be one of gemm, got 'gemv'"),
        ("awq-64", "group_size", 48, r"groups of 48 do not divide its rows of 256"),
        (
            "awq-64",
            "group_size",
            16,
            r"it has groups of 16, and Cardan reads groups that are whole blocks of 32, 64, 128",
        ),
        ("awq-64", "group_size", "64", r"quantization_config.group_size must be a whole number, got '64'"),
        ("awq-64", "group_size", 0, r"groups of 0 do not divide its rows of 256"),
        (
            "awq-64",
            "modules_to_not_convert",
            "lm_head",
            r"modules_to_not_convert must be a list of names, got 'lm_head'",
        ),
        ("gptq4-32-sym", "bits", 2, r"quantization_config.bits must be one of 4, 8, got 2"),
        ("gptq4-32-sym", "sym", "yes", r"quantization_config.sym must be true or false, got 'yes'"),
        (
            "gptq4-32-sym",
            "checkpoint_format",
            "marlin",
            r"checkpoint_format must be one of gptq, gptq_v2, got 'marlin'",
        ),
        ("gptq4-32-sym", "dynamic", {"+:[": {}}, r"quantization_config.dynamic has the pattern '\[', which is none"),
        ("gptq4-32-sym", "dynamic", {"a": 1}, r"quantization_config.dynamic of 'a' must be an object, got 1"),
        ("gptq4-32-sym", "dynamic", [], r"quantization_config.dynamic must be an object, got \[\]"),
        ("fp8-blocks", "weight_block_size", [128], r"weight_block_size must be two whole numbers above 0, got \[128\]"),
        ("fp8-blocks", "weight_block_size", [128, 24], r"has shape \[1, 2\], but blocks of \[128, 24\] in a weight of"),
        ("fp8-blocks", "activation_scheme", "none", r"activation_scheme must be one of dynamic, static, got 'none'"),
        ("fp8-blocks", "fmt", "e5m2", r"quantization_config.fmt must be one of e4m3, got 'e5m2'"),
        ("ct-int4", "format", "marlin-24", r"quantization_config.format must be one of pack-quantized, .*'marlin-24'"),
        ("ct-int4", "config_groups", {}, r"config_groups must be an object with at least one group, got \{\}"),
        ("ct-int4", "config_groups", 3, r"config_groups must be an object, got 3"),
        ("ct-int4", "ignore", ["re:("], r"quantization_config.ignore has the pattern '\(', which is none"),
        (
            "ct-int4",
            "config_groups/group_0/weights/num_bits",
            3,
            r"group_0.weights.num_bits must be one of 4, 8, got 3",
        ),
        ("ct-int4", "config_groups/group_0/weights/strategy", "magic", r"strategy must be one of tensor, .*'magic'"),
        (
            "ct-int4",
            "config_groups/group_0/targets",
            ["re:other"],
            r"no group of quantization_config.config_groups targ",
        ),
        ("ct-fp8-blocks", "config_groups/group_0/weights/block_structure", None, r"block_structure must be two whole"),
        ("ct-int4", "sparsity_config", {"format": "sparse-24-bitmask"}, r"sparsity_config is .* Cardan does not read"),
        ("ct-int4", "transform_config", {"a": 1}, r"transform_config is .* Choose a checkpoint without it"),
        ("ct-w8a8", "config_groups/group_0/weights/num_bits", 4, r"the config says int4, but its weight is I8"),
    ],
)
def test_a_setting_that_is_not_read_is_named(tmp_path, name, path, value, message):
    config = changed(METHODS[name].config, path, value)
    with pytest.raises(CheckpointError, match=message):
        opened(tmp_path / "m", config, one_linear(name))


def broken_scales(parts, suffix, value):
    before = parts[suffix]
    array = np.array(before.bits if isinstance(before, Raw) else before, order="C")
    array.reshape(-1)[0] = value
    return {**parts, suffix: Raw(array, before.dtype) if isinstance(before, Raw) else array}


@pytest.mark.parametrize(
    ("name", "suffix", "value", "message"),
    [
        ("awq-64", ".scales", np.nan, r"up_proj.scales holds NaN or infinity, 1 of its 256 values. Fetch"),
        ("gptq4-32-sym", ".scales", np.inf, r"up_proj.scales holds NaN or infinity, 1 of its 512 values"),
        ("gptq4-64-asym", ".scales", np.nan, r"up_proj.scales holds NaN or infinity, 1 of its 256 values"),
        ("fp8-blocks", ".weight_scale_inv", np.nan, r"weight_scale_inv holds NaN or infinity, 1 of its 2 values"),
        ("ct-int4", ".weight_scale", np.nan, r"weight_scale holds NaN or infinity, 1 of its 512 values"),
        ("ct-w8a8", ".weight_scale", 0x7FC0, r"weight_scale holds NaN or infinity, 1 of its 64 values"),
        ("mxfp4", ".weight_scales", 255, r"weight_scales holds NaN, 1 of its 512 values"),
        ("ct-mxfp4", ".weight_scale", 255, r"weight_scale holds NaN, 1 of its 512 values"),
        ("ct-int4", ".weight_shape", 63, r"weight_shape says \[63, 256\], but .weight_packed has \[64, 256\]"),
        (
            "gptq4-32-sym",
            ".qzeros",
            0x77777778,
            r"the config says that it is symmetric, but its zero points are 8 to 9 instead of 8. Set \"sym\" to false",
        ),
        ("gptq4-act-order", ".g_idx", 8, r"g_idx must name each of 8 groups 32 times, but it names groups 0 to 8 unev"),
        ("gptq4-act-order", ".g_idx", -1, r"g_idx must name each of 8 groups 32 times, but it names groups -1 to 7"),
    ],
)
def test_bad_data_is_named_when_it_is_read(tmp_path, name, suffix, value, message):
    parts = broken_scales(one_linear(name), suffix, value)
    checkpoint = opened(tmp_path / "m", METHODS[name].config, parts)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.tensor(f"{LINEAR}.weight")
    checkpoint.close()


def test_groups_of_uneven_sizes_are_refused(tmp_path):
    parts = one_linear("gptq4-act-order")
    index = np.array(parts[".g_idx"])
    index[index == 7] = 6
    checkpoint = opened(tmp_path / "m", METHODS["gptq4-act-order"].config, {**parts, ".g_idx": index})
    with pytest.raises(CheckpointError, match="groups 0 to 6 unevenly"):
        checkpoint.tensor(f"{LINEAR}.weight")
    checkpoint.close()


def test_a_wrong_type_is_named(tmp_path):
    parts = {**one_linear("awq-64"), ".scales": np.ones((4, 64), np.int32)}
    with pytest.raises(CheckpointError, match=r"up_proj.scales is I32, expected F16 or BF16 or F32"):
        opened(tmp_path / "m", METHODS["awq-64"].config, parts)


def test_a_config_that_is_no_object_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"quantization_config must be an object, got 'awq'"):
        opened(tmp_path / "m", "awq", one_linear("awq-64"))


@pytest.mark.parametrize("name", ["fp8-blocks", "ct-w8a8", "awq-64", "mxfp4"])
def test_modules_that_are_left_out_stay_as_they_are(tmp_path, name):
    key = "ignore" if name.startswith("ct") else "modules_to_not_convert"
    parts = one_linear(name)
    checkpoint = opened(tmp_path / "m", {**METHODS[name].config, key: ["mlp.up_proj"]}, parts)
    assert set(checkpoint.tensor_info()) == {LINEAR + suffix for suffix in parts}
    checkpoint.close()


def test_modules_may_have_settings_of_their_own(tmp_path):
    parts = one_linear("gptq8-64-asym")
    rules = {r"-:.*\.gate_proj": {}, r"+:.*\.up_proj": {"bits": 8, "group_size": 64, "sym": False}}
    config = {**METHODS["gptq4-32-sym"].config, "dynamic": rules}
    checkpoint = opened(tmp_path / "m", config, parts)
    assert checkpoint.tensor_info() == {f"{LINEAR}.weight": ("AFFINE8_64_F32", (ROWS, COLUMNS))}
    checkpoint.close()
    left_out = LINEAR.replace("up", "gate")
    checkpoint = opened(tmp_path / "n", config, parts, left_out)
    assert set(checkpoint.tensor_info()) == {left_out + suffix for suffix in parts}
    checkpoint.close()


def test_groups_of_a_config_name_their_modules(tmp_path):
    config = deepcopy(dict(METHODS["ct-int4"].config))
    other = deepcopy(config["config_groups"]["group_0"])
    other["weights"] |= {"num_bits": 8, "group_size": 64}
    config["config_groups"]["group_1"] = {**other, "targets": ["re:.*up_proj"]}
    checkpoint = opened(tmp_path / "m", config, one_linear("ct-int8-act-order"))
    assert checkpoint.tensor_info()[f"{LINEAR}.weight"] == ("INT8_64_F16", (ROWS, COLUMNS))
    checkpoint.close()


def test_settings_in_a_file_of_older_tools_are_read(tmp_path):
    parts = one_linear("awq-64")
    (tmp_path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 64, "version": "GEMM"}))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["X"]}))
    save(tmp_path / "model.safetensors", {LINEAR + suffix: part for suffix, part in parts.items()})
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
    assert checkpoint.tensor_info() == {f"{LINEAR}.weight": ("AFFINE4_64_F32", (ROWS, COLUMNS))}
    checkpoint.close()


def test_settings_may_stand_with_the_text_model(tmp_path):
    parts = one_linear("awq-64")
    config = {"architectures": ["X"], "text_config": {"quantization_config": dict(METHODS["awq-64"].config)}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    save(tmp_path / "model.safetensors", {LINEAR + suffix: part for suffix, part in parts.items()})
    checkpoint = open_checkpoint(ModelConfig(model=str(tmp_path)))
    assert checkpoint.tensor_info() == {f"{LINEAR}.weight": ("AFFINE4_64_F32", (ROWS, COLUMNS))}
    checkpoint.close()
