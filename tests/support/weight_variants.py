"""Files of one model whose weights are encoded in other formats, written by the package gguf. It knows no test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf

LEFT_OUT = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version", "tokenizer.")
"""How keys begin that the writer sets, that say how the source was encoded, or that hold its tokenizer, which is slow
to read."""


def write_variant(source: Path, path: Path, fmt: str) -> Path:
    """A GGUF file's model, without its tokenizer: matrices in ``fmt``, such as ``Q8_0``, and the rest in float32."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(path, str(reader.fields["general.architecture"].contents()))
    for name, field in reader.fields.items():
        if not name.startswith(LEFT_OUT):
            kinds = field.types
            writer.add_key_value(name, field.contents(), kinds[0], kinds[-1] if len(kinds) > 1 else None)
    kind = gguf.GGMLQuantizationType[fmt]
    for tensor in reader.tensors:
        values: Any = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2 and fmt != "F32":
            writer.add_tensor(tensor.name, gguf.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
