"""Real files with other formats than the bundled model's, where CARDAN_TEST_MODELS has some."""

from __future__ import annotations

import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from cardan.config import ModelConfig
from cardan.quantization import BLOCK_FORMATS, slice_rows
from cardan.weights import open_checkpoint

FOLDER = Path(os.environ.get("CARDAN_TEST_MODELS") or "/nowhere")
FILES = sorted(FOLDER.glob("*q4_k_m*.gguf")) if FOLDER.is_dir() else []


@pytest.mark.model
@pytest.mark.skipif(not FILES, reason="CARDAN_TEST_MODELS has no *q4_k_m*.gguf")
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_the_first_rows_of_each_format_have_the_values_of_the_gguf_package(path: Path) -> None:
    checkpoint = open_checkpoint(ModelConfig(model=str(path)))
    seen: set[str] = set()
    for name, (fmt, shape) in checkpoint.tensor_info().items():
        if fmt in seen or fmt not in BLOCK_FORMATS:
            continue
        seen.add(fmt)
        view = slice_rows(checkpoint.tensor(name), 0, min(64, shape[0]))
        raw = np.frombuffer(view.data, dtype=np.uint8).reshape(view.shape[0], -1)
        expected = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[fmt])
        got = checkpoint.dequantize(view)
        np.testing.assert_array_equal(got, expected, err_msg=name)
        assert 1e-4 < np.abs(got).mean() < 1
    assert seen >= {"Q4_K", "Q6_K"}
