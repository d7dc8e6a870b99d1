"""Model files of the comparison: one model in the forms that the engines read, each made once.

SmolLM2 comes from its GGUF file; the shape of Qwen3-0.6B gets random weights and SmolLM2's tokenizer, padded. It knows
no engine.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cardan.config import ModelConfig
from cardan.quantization import quantize
from cardan.weights import open_checkpoint

Tensors = Iterator[tuple[str, npt.NDArray[np.float32]]]

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""The shape of Qwen3-0.6B."""

_DEVIATION = 0.02
_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model lies in the forms that engines read; a form that nobody needs is not made.

    Attributes:
        folder: of Hugging Face's form, weights in bfloat16.
        gguf: one GGUF file by format of the weights.
    """

    folder: Path
    gguf: Mapping[str, Path]

    def path(self, form: str) -> Path:
        """``folder`` or a format of GGUF."""
        return self.folder if form == "folder" else self.gguf[form]


def make_models(source: Path, kept: Path, say: Callable[[str], None]) -> dict[str, ModelFiles]:
    """The files of all models, made where they are not there yet.

    Args:
        source: the GGUF file of SmolLM2.
        kept: where they are kept.
        say: told what takes long.
    """
    smol = ModelFiles(kept / "smollm2-135m-bf16", {"Q4_1": source, "F16": kept / "smollm2-135m.F16.gguf"})
    qwen = ModelFiles(
        kept / "qwen3-0.6b-shape-bf16",
        {fmt: kept / f"qwen3-0.6b-shape.{fmt}.gguf" for fmt in ("F16", "Q8_0", "Q4_1")},
    )
    kept.mkdir(parents=True, exist_ok=True)
    _once(smol.folder, say, lambda path: _smollm2_folder(source, path))
    _once(smol.gguf["F16"], say, lambda path: _smollm2_f16(source, path))
    _once(qwen.folder, say, lambda path: _qwen3_folder(smol.folder, path))
    for fmt, path in qwen.gguf.items():
        _once(path, say, lambda part, fmt=fmt: _qwen3_gguf(source, fmt, part))
    return {"smollm2": smol, "qwen3": qwen}


def _once(path: Path, say: Callable[[str], None], make: Callable[[Path], None]) -> None:
    """Make a file or folder beside its place and move it there, so that what is there is whole."""
    if path.exists():
        return
    say(f"making {path.name}")
    part = path.with_name(path.name + ".part")
    if part.is_dir():
        shutil.rmtree(part)
    make(part)
    part.rename(path)


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Tensors) -> None:
    """A safetensors file in bfloat16, one tensor in memory at a time; ``tensors`` come in the order of ``shapes``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for (name, values), expected in zip(tensors, shapes, strict=True):
            assert name == expected
            file.write(quantize(values, "BF16"))


def _smollm2_folder(source: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    folder.mkdir()
    checkpoint = open_checkpoint(ModelConfig(model=str(source)))
    shapes = {name: shape for name, (_, shape) in checkpoint.tensor_info().items()}
    write_safetensors(
        folder / "model.safetensors",
        shapes,
        ((name, checkpoint.dequantize(checkpoint.tensor(name)).reshape(shape)) for name, shape in shapes.items()),
    )
    config = {key: value for key, value in checkpoint.config.items() if not key.startswith("cardan_")}
    (folder / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}, indent=1))
    checkpoint.close()
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)


def _qwen3_folder(smollm2: Path, folder: Path) -> None:
    folder.mkdir()
    shapes = qwen3_shapes()
    write_safetensors(folder / "model.safetensors", shapes, _random(shapes))
    (folder / "config.json").write_text(json.dumps(QWEN3, indent=1))
    for path in smollm2.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            shutil.copy(path, folder / path.name)


def qwen3_shapes() -> dict[str, tuple[int, ...]]:
    """Shape of each tensor by its Hugging Face name."""
    hidden, ffn, dim = 1024, 3072, 128
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (16 * dim, hidden),
        "self_attn.k_proj": (8 * dim, hidden),
        "self_attn.v_proj": (8 * dim, hidden),
        "self_attn.o_proj": (hidden, 16 * dim),
        "self_attn.q_norm": (dim,),
        "self_attn.k_norm": (dim,),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (151_936, hidden)}
    for index in range(28):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return {**shapes, "model.norm.weight": (hidden,)}


def _random(shapes: Mapping[str, tuple[int, ...]]) -> Tensors:
    """Normal values for matrices and ones for norms; the same for every form."""
    for index, (name, shape) in enumerate(shapes.items()):
        if name.endswith("norm.weight"):
            yield name, np.ones(shape, np.float32)
        else:
            values = np.random.default_rng(index).standard_normal(shape, dtype=np.float32)
            yield name, values * np.float32(_DEVIATION)


def gguf_name(name: str) -> str:
    """What GGUF calls a tensor of Qwen3."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    _, _, index, module = name.removesuffix(".weight").split(".", 3)
    return f"blk.{index}.{_GGUF_NAMES[module]}.weight"


def _smollm2_f16(source: Path, path: Path) -> None:
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, "llama")
    _copy_fields(reader, writer, lambda key: True)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    for tensor in reader.tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, values.astype(np.float16 if values.ndim > 1 else np.float32))
    _finish(writer)


def _qwen3_gguf(source: Path, fmt: str, path: Path) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    _copy_fields(gguf.GGUFReader(source), writer, lambda key: key.startswith("tokenizer."))
    writer.add_block_count(28)
    writer.add_context_length(40_960)
    writer.add_embedding_length(1024)
    writer.add_feed_forward_length(3072)
    writer.add_head_count(16)
    writer.add_head_count_kv(8)
    writer.add_key_length(128)
    writer.add_value_length(128)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(151_936)
    writer.add_file_type(gguf.LlamaFileType["MOSTLY_" + fmt])
    shapes = qwen3_shapes()
    for name, values in _random(shapes):
        if values.ndim < 2:
            writer.add_tensor(gguf_name(name), values)
        else:
            # As files of SmolLM2 are: an embedding of 8 bits beside matrices of 4.
            wanted = "Q8_0" if fmt == "Q4_1" and "embed" in name else fmt
            raw = np.frombuffer(quantize(values, wanted), np.uint8).reshape(values.shape[0], -1)
            kind = gguf.GGMLQuantizationType[wanted]
            if wanted == "F16":
                writer.add_tensor(gguf_name(name), raw.view(np.float16))
            else:
                writer.add_tensor(gguf_name(name), raw, raw_dtype=kind)
    _finish(writer)


def _copy_fields(reader: Any, writer: Any, wanted: Callable[[str], bool]) -> None:
    """Copy metadata; a vocabulary that is too small for Qwen3's shape is padded."""
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.file_type") or not wanted(key):
            continue
        value, kind = field.contents(), field.types[0]
        if kind.name != "ARRAY":
            writer.add_key_value(key, value, kind)
            continue
        if writer.arch == "qwen3":
            value = _padded(key, value)
        writer.add_key_value(key, value, kind, sub_type=field.types[-1])


def _padded(key: str, value: list[Any]) -> list[Any]:
    missing = 151_936 - len(value)
    if key == "tokenizer.ggml.tokens":
        return [*value, *(f"<|unused_{index}|>" for index in range(missing))]
    if key == "tokenizer.ggml.token_type":
        return [*value, *([5] * missing)]  # 5 is "unused"
    return value


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
