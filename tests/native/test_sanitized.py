"""That the sanitizers see what goes wrong, where `make native-sanitize` runs the tests under them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

cn = pytest.importorskip("cardan_native")

pytestmark = pytest.mark.skipif(
    "libasan" not in os.environ.get("LD_PRELOAD", ""), reason="runs under the address sanitizer only"
)

PROGRAM = """
import ctypes
import numpy as np
import cardan_native as cn

native = cn.load()
x = native.Tensor.{made}
address = x.bits().ctypes.data
{then}
print("nothing was seen")
"""
BEYOND = "ctypes.memset(address + 4 * {elements} - 4, 0, 8)"
GIVEN_BACK = "del x; ctypes.memset(address, 0, 4)"


@pytest.mark.parametrize("elements", [5, 16, 1000, 300_001])
@pytest.mark.parametrize(
    ("made", "then"),
    [
        ("zeros(({elements},), 'float32')", BEYOND),
        ("from_bits(np.zeros({elements}, np.float32), 'float32')", BEYOND),
        ("from_bits(np.zeros({elements}, np.float32), 'float32')", GIVEN_BACK),
    ],
)
def test_memory_that_no_tensor_has_is_not_touched_unseen(elements: int, made: str, then: str) -> None:
    program = PROGRAM.format(made=made.format(elements=elements), then=then.format(elements=elements))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0, done.stdout
    assert "AddressSanitizer: use-after-poison" in done.stderr
