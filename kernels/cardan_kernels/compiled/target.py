"""Compiles what a variant launches for a chip that is not there, and reads what the compiled code takes of it.

It knows no kernel. Triton is made to believe in the chip: its launches then compile, exactly as they would there for
the same arguments, and nothing is run.
"""

from __future__ import annotations

import re
import struct
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from cardan_kernels.chips import Chip, assume
from cardan_kernels.compiled.variant import Variant

BUNDLED = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel, compiled.

    Attributes:
        chip: that it is for.
        op: the variant's operation.
        variant: its name.
        kernel: name of the function.
        default: whether a plan takes it without being told to.
        warps: of a block.
        registers: of a thread: general ones, or vector registers.
        shared_bytes: shared memory, or LDS, of a block.
        spill_bytes: of a thread's memory that registers did not suffice for.
        code_bytes: of machine code.
    """

    chip: str
    op: str
    variant: str
    kernel: str
    default: bool
    warps: int
    registers: int
    shared_bytes: int
    spill_bytes: int
    code_bytes: int


class _Driver:
    """What Triton asks of a driver before it compiles."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def get_current_target(self) -> Any:
        chip = self._chip
        arch: int | str = int(chip.name.removeprefix("sm_")) if chip.family == "cuda" else chip.name
        return GPUTarget(chip.family, arch, chip.warp)

    def get_current_device(self) -> str:
        return self._chip.name

    def get_current_stream(self, device: str) -> int:
        return 0


def compile_variant(variant: Variant, chip: Chip) -> tuple[Compiled, ...]:
    """Every kernel that a variant launches, compiled for a chip.

    Raises:
        RuntimeError: kernels were made for the interpreter, so that there is nothing to compile.
    """
    with _chip_at_hand(chip) as launched:
        variant.run()
    if not launched:
        raise RuntimeError(f"{variant.name} launched no kernel that can be compiled. Unset TRITON_INTERPRET.")
    return tuple(_measured(variant, chip, name, code) for name, code in launched)


@contextmanager
def _chip_at_hand(chip: Chip) -> Iterator[list[tuple[str, Any]]]:
    """Launches within compile for ``chip``; gives the list that names and results are added to.

    The process is good for nothing else afterwards: Triton goes on believing in the chip.
    """
    launched: list[tuple[str, Any]] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        code = run(self, *args, grid=grid, warmup=True, **options)
        launched.append((self.fn.__name__, code))
        return code

    driver.set_active(_Driver(chip))
    JITFunction.run = compile_only
    try:
        with assume(chip.name):
            yield launched
    finally:
        JITFunction.run = run


def _measured(variant: Variant, chip: Chip, kernel: str, code: Any) -> Compiled:
    if chip.family == "cuda":
        binary = code.asm["cubin"]
        registers, spilled = nvidia_usage(_resource_usage(binary))
    else:
        binary = code.asm["hsaco"]
        registers, spilled = amd_usage(code.asm["amdgcn"])
    return Compiled(
        chip=chip.name,
        op=variant.op,
        variant=variant.name,
        kernel=kernel.strip("_"),
        default=variant.default,
        warps=int(code.metadata.num_warps),
        registers=registers,
        shared_bytes=int(code.metadata.shared),
        spill_bytes=spilled,
        code_bytes=code_bytes(binary),
    )


def _resource_usage(cubin: bytes) -> str:
    import tempfile

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        words = [str(BUNDLED / "cuobjdump"), "-res-usage", file.name]
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def nvidia_usage(report: str) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack and local memory, from what ``cuobjdump -res-usage`` says.

    Raises:
        ValueError: it says something else.
    """
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", report)
    if found is None:
        raise ValueError(f"cuobjdump names no registers, stack and local memory: {report!r}. Check Triton's version.")
    registers, stack, local = (int(number) for number in found.groups())
    return registers, stack + local


def amd_usage(assembly: str) -> tuple[int, int]:
    """Vector registers of a thread and bytes of its private memory, from the metadata of AMD's assembly.

    Raises:
        ValueError: there is no such metadata.
    """
    numbers = dict(re.findall(r"\.(vgpr_count|vgpr_spill_count|private_segment_fixed_size):\s*(\d+)", assembly))
    if len(numbers) != 3:
        raise ValueError(f"The assembly's metadata has only {', '.join(numbers) or 'nothing'}. Check Triton's version.")
    spilled = 4 * int(numbers["vgpr_spill_count"])
    return int(numbers["vgpr_count"]), max(spilled, int(numbers["private_segment_fixed_size"]))


def code_bytes(elf: bytes) -> int:
    """Bytes of machine code in an ELF file: of its sections ``.text`` and those named after it."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + index * size) for index in range(count)]
    names_at = headers[names][4]
    total = 0
    for name, _, _, _, _, length in headers:
        label = elf[names_at + name : elf.index(b"\0", names_at + name)]
        if label == b".text" or label.startswith(b".text."):
            total += length
    return total
