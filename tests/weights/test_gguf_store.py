"""Tensors of GGUF files: the names and the values that transformers and the gguf package give them."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
import transformers.modeling_gguf_pytorch_utils

from cardan.config import ModelConfig
from cardan.errors import CheckpointError
from cardan.weights import OpenedCheckpoint, open_checkpoint
from cardan.weights.gguf.names import PERMUTED, hugging_face_name, unpermuted_rows

LAYERS = 2


def open_file(path: Path) -> OpenedCheckpoint:
    return open_checkpoint(ModelConfig(model=str(path)))


def values_of(checkpoint: OpenedCheckpoint) -> dict[str, np.ndarray]:
    return {name: checkpoint.dequantize(checkpoint.tensor(name)) for name in checkpoint.names()}


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "gemma2", "gemma3"])
def test_names_and_values_are_those_that_transformers_loads(tiny_gguf: Callable[..., Path], architecture: str) -> None:
    path = tiny_gguf(architecture, tied=architecture.startswith("gemma"))
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    theirs = {name: value.numpy() for name, value in model.state_dict().items()}
    ours = values_of(open_file(path))
    assert ours.keys() == theirs.keys() - ({"lm_head.weight"} if architecture.startswith("gemma") else set())
    for name, value in ours.items():
        if architecture.startswith("gemma") and name.endswith("norm.weight"):
            np.testing.assert_allclose(value - 1, theirs[name], rtol=1e-6, atol=1e-7, err_msg=name)
        else:
            np.testing.assert_array_equal(value, theirs[name], err_msg=name)


def test_tensors_of_mxfp4_have_the_values_of_the_gguf_package(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama", fmt="MXFP4")
    checkpoint = open_file(path)
    formats = {fmt for fmt, shape in checkpoint.tensor_info().values() if len(shape) == 2}
    assert formats == {"MXFP4"}
    for tensor in gguf.GGUFReader(path).tensors:
        if tensor.name == "blk.0.ffn_down.weight":
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
    got = checkpoint.dequantize(checkpoint.tensor("model.layers.0.mlp.down_proj.weight"))
    np.testing.assert_array_equal(got, expected)
    assert np.abs(got).max() > 1
    checkpoint.close()


CONFIGS = {
    "granite": transformers.GraniteConfig,
    "olmo2": transformers.Olmo2Config,
    "llama": transformers.LlamaConfig,
    "qwen2": transformers.Qwen2Config,
    "qwen3": transformers.Qwen3Config,
    "gemma2": transformers.Gemma2Config,
    "gemma3": transformers.Gemma3TextConfig,
    "phi3": transformers.Phi3Config,
}


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_tensor_of_a_model_has_the_name_that_the_gguf_package_gives_it(architecture: str) -> None:
    sizes = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 48}
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[architecture](**sizes))
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    name_map = gguf.get_tensor_name_map(kind, LAYERS)
    names = [
        name
        for name in model.state_dict()
        if "rotary" not in name and not (name == "lm_head.weight" and model.config.tie_word_embeddings)
    ]
    assert len(names) > 10
    for name in names:
        file_name = name_map.get_name(name, try_suffixes=(".weight", ".bias"))
        assert file_name is not None, name
        assert hugging_face_name(architecture, file_name, LAYERS) == name


def test_granite_rows_are_put_back_in_order(tiny_gguf: Callable[..., Path]) -> None:
    """Granite's converter inherits the reordering of Llama's; written out here per head and pair."""
    path = tiny_gguf("granite")
    ours = values_of(open_file(path))
    raw = {item.name: gguf.quants.dequantize(item.data, item.tensor_type) for item in gguf.GGUFReader(path).tensors}
    for name, heads in (("q", 4), ("k", 2)):
        stored = raw[f"blk.1.attn_{name}.weight"]
        for head in range(heads):
            for row in range(16):
                pair, half = row % 8, row // 8
                expected = stored[head * 16 + 2 * pair + half]
                np.testing.assert_array_equal(
                    ours[f"model.layers.1.self_attn.{name}_proj.weight"][head * 16 + row], expected
                )


@pytest.mark.parametrize("architecture", sorted(set(CONFIGS) - PERMUTED - {"phi3"}))
def test_rows_of_other_architectures_stay(tiny_gguf: Callable[..., Path], architecture: str) -> None:
    path = tiny_gguf(architecture)
    raw = {item.name: gguf.quants.dequantize(item.data, item.tensor_type) for item in gguf.GGUFReader(path).tensors}
    ours = values_of(open_file(path))
    np.testing.assert_array_equal(ours["model.layers.0.self_attn.q_proj.weight"], raw["blk.0.attn_q.weight"])


def test_biases_of_llama_are_put_back_in_order_too(tiny_gguf: Callable[..., Path]) -> None:
    bias = np.arange(64, dtype=np.float32)
    checkpoint = open_file(tiny_gguf("llama", tensors={"blk.0.attn_q.bias": (bias, "F32")}))
    view = checkpoint.tensor("model.layers.0.self_attn.q_proj.bias")
    np.testing.assert_array_equal(
        checkpoint.dequantize(view)[:16], [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15]
    )


def test_reordered_rows_stay_quantized(tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_file(tiny_gguf("llama", fmt="Q4_1"))
    view = checkpoint.tensor("model.layers.0.self_attn.k_proj.weight")
    assert (view.dtype, view.shape, len(view.data)) == ("Q4_1", (32, 64), 32 * 2 * 20)


def test_the_order_undoes_what_the_converter_does() -> None:
    """Llama's converter: the two halves of a head, each of d/2 rows, become neighbours."""
    rows = np.arange(3 * 8).reshape(3, 2, 4)
    stored = rows.swapaxes(1, 2).reshape(-1)
    np.testing.assert_array_equal(stored[unpermuted_rows(3, 8)], rows.reshape(-1))


def test_tensors_that_are_not_reordered_are_mapped(tiny_gguf: Callable[..., Path]) -> None:
    path = tiny_gguf("llama")
    checkpoint = open_file(path)
    view = checkpoint.tensor("model.layers.0.mlp.up_proj.weight")
    with path.open("r+b") as file:
        offset = gguf.GGUFReader(path).get_tensor(
            [t.name for t in gguf.GGUFReader(path).tensors].index("blk.0.ffn_up.weight")
        )
        file.seek(offset.data_offset)
        file.write(b"\x77")
    assert view.data[0] == 0x77
    assert view.data.readonly


def test_old_rotary_tensors_are_left_out(tiny_gguf: Callable[..., Path]) -> None:
    old = {"blk.0.attn_rot_embd.weight": (np.ones(8, dtype=np.float32), "F32")}
    assert not [name for name in open_file(tiny_gguf("llama", tensors=old)).names() if "rot" in name]


def test_info_needs_no_data(tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_file(tiny_gguf("llama", fmt="Q4_0"))
    assert checkpoint.tensor_info()["model.layers.1.mlp.down_proj.weight"] == ("Q4_0", (64, 96))
    assert checkpoint.tensor_info().keys() == set(checkpoint.names())


def test_a_tensor_that_is_not_there_is_named_with_a_similar_one(tiny_gguf: Callable[..., Path]) -> None:
    checkpoint = open_file(tiny_gguf("llama"))
    with pytest.raises(
        CheckpointError,
        match=r"has no tensor 'model.layers.7.mlp.up_proj.weight' among its 20 \(it has 'model.layers.0",
    ):
        checkpoint.tensor("model.layers.7.mlp.up_proj.weight")
    with pytest.raises(CheckpointError, match=r"has no tensor 'x' among its 20\. The weights are incomplete"):
        checkpoint.tensor("x")


def reversed_permutation(values: np.ndarray, heads: int) -> np.ndarray:
    processor = transformers.modeling_gguf_pytorch_utils.LlamaTensorProcessor()
    return processor._reverse_permute_weights(values, heads, heads)


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_has_the_values_of_the_gguf_package(smollm2_path: Path, smollm2_reader: gguf.GGUFReader) -> None:
    checkpoint = open_file(smollm2_path)
    reader = {item.name: item for item in smollm2_reader.tensors}
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
        "model.layers.29.self_attn.k_proj.weight": "blk.29.attn_k.weight",
        "model.layers.29.self_attn.v_proj.weight": "blk.29.attn_v.weight",
        "model.layers.15.mlp.down_proj.weight": "blk.15.ffn_down.weight",
    }
    assert len(list(checkpoint.names())) == len(reader) == 272
    for ours, theirs in names.items():
        expected = gguf.quants.dequantize(reader[theirs].data, reader[theirs].tensor_type)
        if "attn_q" in theirs or "attn_k" in theirs:
            expected = reversed_permutation(expected, 9 if "attn_q" in theirs else 3)
        np.testing.assert_array_equal(checkpoint.dequantize(checkpoint.tensor(ours)), expected, err_msg=ours)


@pytest.mark.model
@pytest.mark.skipif(sys.platform != "linux", reason="how much of a mapping is in memory stands in /proc")
def test_opening_reads_no_tensor(smollm2_path: Path) -> None:
    """Metadata is less than 2 MB of the file, and a tensor is in memory once it is read."""

    def resident_kb() -> int:
        """Of all mappings of the file: other tests may have some too."""
        mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)
        ours = [one for one in mappings if one.partition("\n")[0].endswith(smollm2_path.name)]
        return sum(int(size) for one in ours for size in re.findall(r"^Rss: +(\d+) kB$", one, re.MULTILINE))

    before_kb = resident_kb()
    checkpoint = open_file(smollm2_path)
    opened_kb = resident_kb() - before_kb
    assert 0 < opened_kb < 8_000
    embedding = checkpoint.tensor("model.embed_tokens.weight")
    assert np.frombuffer(embedding.data, np.uint8).any(axis=0)
    assert resident_kb() - before_kb > opened_kb + len(embedding.data) // 2048
    checkpoint.close()
