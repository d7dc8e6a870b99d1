"""Measures at how many rows linears should change from one native kernel to another on this processor.

It measures for ``cardan tune`` alone. What a linear computes does not depend on these numbers, but for bfloat16 on
processors with tiles, which sum in another order.
"""

from __future__ import annotations

import functools
import hashlib
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from cardan.platform import LinearSpec, Tunable, TunedLinear, Tuner, TuningProgress
from cardan.quantization import format_spec
from cardan_cpu.native_crossovers import (
    CACHE,
    FEW,
    FOR_MANY,
    MANY,
    REGISTERS,
    crossover_ranges,
    default_crossovers,
)
from cardan_cpu.native_linear import ACTIVATIONS, ROUNDINGS, NativeLinear

DTYPES = ("float32", "bfloat16")
"""Types of activations that kernels differ for."""

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 20, 24, 32)
"""Rows of activations that are measured."""

PROMPT_ROWS = (64, 128, 256, 512)
"""More that are: those of parts of prompts, up to the largest part that this platform recommends."""

SIZES = (4096, 2048)
"""Rows and columns of weights where no model is given: more than second-level caches hold."""

SIZES_OF_A_MODEL = 3
"""Weights that are measured of each kind, those that most of the work is in."""

MOST_FEATURES = 8192
"""Rows of a weight that are measured; more take longer and say the same."""

ROUNDS = 7
"""Times that each call is made; the fastest counts, which other programs disturbed least."""

PROMPT_ROUNDS = 2
"""Likewise with rows of prompts, which take long enough to be little disturbed."""

KEPT_WITHIN = 0.02
"""A default is kept where it costs no more than this share above the best: measurements are no better than that."""

FILL = 0x11
"""Every byte of weights that are measured: tame codes, and scales that are no slow numbers in any format."""

HELP = {
    FEW: "rows up to which codes are taken apart in registers instead of widened into the cache",
    MANY: "rows from which on the kernel for many rows is taken",
}

Times = Mapping[str, Mapping[int, float]]
"""Seconds of a call, by kernel and rows that it can be taken for."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured together.

    Attributes:
        kind: codes of the weights and what activations are rounded to, as crossovers are named after.
        parts: which crossovers are to be found, ``few`` and ``many``.
        rounding: what activations are rounded to, a member of ``ROUNDINGS``.
        linears: the weights.
    """

    kind: str
    parts: tuple[str, ...]
    rounding: str
    linears: tuple[TunedLinear, ...]


class NativeTuner(Tuner):
    """Crossovers of one variant of the native kernels on this processor."""

    def __init__(self, host: str, variant: str, threads: int, activations: str = ACTIVATIONS[0]) -> None:
        """Load and measure nothing yet.

        Args:
            host: what the processor's maker calls it.
            variant: of the kernels.
            threads: that compute.
            activations: what those of a model are rounded to, a member of ``ACTIVATIONS``.
        """
        self._host = host
        self._variant = variant
        self._threads = threads
        self._activations = activations

    @property
    def processor(self) -> str:
        """The processor, the variant of the kernels, and the number of threads."""
        return f"{self._host} ({self._variant}, {self._threads} thread{'s' if self._threads > 1 else ''})"

    @property
    def kernels(self) -> str:
        """The variant, and what its module is made of: another build is another version."""
        spec = find_spec(f"cardan_native._{self._variant}")
        assert spec is not None
        assert spec.origin is not None
        return f"cardan-native {self._variant} {_digest(spec.origin)}"

    def tunables(self) -> tuple[Tunable, ...]:
        """The crossovers of every kind of weight that this variant has a choice for."""
        defaults = default_crossovers(self._variant)
        return tuple(
            Tunable(name=name, default=defaults[name], least=least, most=most, help=HELP[name.rpartition(".")[2]])
            for name, (least, most) in sorted(all_ranges(self._native()).items())
        )

    def measure(self, linears: Sequence[TunedLinear], progress: TuningProgress) -> Mapping[str, int]:
        """Time the kernels against each other; see ``Tuner.measure``."""
        native = self._native()
        before = native.threads()
        native.set_threads(self._threads)
        try:
            asked = ((linear, self._rounding(linear)) for linear in linears) if linears else self._samples()
            return self._measure(self._jobs(asked), progress)
        finally:
            native.set_threads(before)

    def _measure(self, jobs: Sequence[Job], progress: TuningProgress) -> dict[str, int]:
        tunables = {tunable.name: tunable for tunable in self.tunables()}
        found: dict[str, int] = {}
        for done, job in enumerate(jobs):
            progress("measuring", done, len(jobs))
            asked = {part: tunables[f"{job.kind}.{part}"] for part in job.parts}
            times = time_kernels(self._native(), job, asked)
            found |= {f"{job.kind}.{part}": value for part, value in best_crossovers(times, asked).items()}
        progress("measuring", len(jobs), len(jobs))
        return found

    def _jobs(self, asked: Iterable[tuple[TunedLinear, str]]) -> list[Job]:
        """Weights with what their activations are rounded to, by kind; those that there is no choice for are left."""
        members: dict[tuple[str, tuple[str, ...], str], list[TunedLinear]] = {}
        for linear, rounding in asked:
            if NativeLinear(self._native(), rounding).claims(linear.fmt, linear.spec) is not None:
                continue
            names = tuple(crossover_ranges(self._native(), linear.fmt, rounding, linear.spec.dtype))
            if names:
                parts = tuple(name.rpartition(".")[2] for name in names)
                members.setdefault((names[0].rpartition(".")[0], parts, rounding), []).append(linear)
        return [Job(*key, _most_work(linears)) for key, linears in members.items()]

    def _samples(self) -> Iterator[tuple[TunedLinear, str]]:
        """A weight for each set of crossovers, with what activations are rounded to."""
        seen: set[tuple[str, ...]] = set()
        for fmt in self._native().packable_formats():
            for rounding in ROUNDINGS:
                for dtype in DTYPES:
                    names = tuple(crossover_ranges(self._native(), fmt, rounding, dtype))
                    if names not in seen:
                        seen.add(names)
                        spec = LinearSpec(name=fmt, out_features=SIZES[0], in_features=SIZES[1], dtype=dtype)
                        yield TunedLinear(fmt, spec), rounding

    def _rounding(self, linear: TunedLinear) -> str:
        return NativeLinear(self._native(), self._activations).rounding(linear.spec)

    def _native(self) -> Any:
        from cardan_native import load

        return load(self._variant)


def all_ranges(native: Any) -> dict[str, tuple[int, int]]:
    """Every crossover that a variant has, as ``crossover_ranges``."""
    found: dict[str, tuple[int, int]] = {}
    for fmt in native.packable_formats():
        for rounding in ROUNDINGS:
            for dtype in DTYPES:
                found |= crossover_ranges(native, fmt, rounding, dtype)
    return found


def best_crossovers(times: Times, asked: Mapping[str, Tunable]) -> dict[str, int]:
    """The numbers with which calls take least, those of each number of rows against its fastest kernel.

    The defaults are kept where they are as good within ``KEPT_WITHIN``.

    Args:
        times: of every kernel that the numbers choose between, for the same rows but where a kernel takes fewer.
        asked: the numbers to be found, by ``few`` and ``many``.
    """
    rows = sorted(times[CACHE])
    few = [asked[FEW].least, *(count for count in rows if count <= asked[FEW].most)] if FEW in asked else [0]
    many = [*rows, asked[MANY].most] if MANY in asked else [rows[-1] + 1]

    least = {count: min(taken[count] for taken in times.values() if count in taken) for count in rows}

    def cost(choice: tuple[int, int]) -> float:
        shares = [times[_kernel(count, choice)][count] / least[count] for count in rows]
        return sum(shares) / len(shares)

    default = (asked[FEW].default if FEW in asked else few[0], asked[MANY].default if MANY in asked else many[0])
    best = min(((up_to, first) for up_to in few for first in many), key=cost)
    chosen = default if cost(default) <= cost(best) * (1 + KEPT_WITHIN) else best
    return {part: value for part, value in zip((FEW, MANY), chosen, strict=True) if part in asked}


def _kernel(rows: int, choice: tuple[int, int]) -> str:
    """The kernel that is taken for so many rows."""
    few, many = choice
    if rows >= many:
        return FOR_MANY
    return REGISTERS if rows <= few else CACHE


def time_kernels(native: Any, job: Job, asked: Mapping[str, Tunable]) -> dict[str, dict[int, float]]:
    """Seconds that each kernel takes for the weights of a job together, by rows."""
    every = ROWS + PROMPT_ROWS
    few = tuple(count for count in every if FEW in asked and count <= asked[FEW].most)
    rows = {kernel: every if MANY in asked and kernel != REGISTERS else few for kernel in (REGISTERS, CACHE, FOR_MANY)}
    calls = {
        kernel: [_Call(native, linear, job.rounding, crossovers) for linear in job.linears]
        for kernel, crossovers in _forced(job.kind, asked).items()
    }
    return {
        kernel: {count: sum(call.seconds(count) for call in made) for count in rows[kernel]}
        for kernel, made in calls.items()
    }


def _forced(kind: str, asked: Mapping[str, Tunable]) -> dict[str, dict[str, int]]:
    """For each kernel that there is a choice of, the crossovers with which it is taken for all rows."""
    never = {f"{kind}.{part}": tunable.most if part == MANY else tunable.least for part, tunable in asked.items()}
    forced = {CACHE: never}
    if FEW in asked:
        forced[REGISTERS] = {**never, f"{kind}.{FEW}": asked[FEW].most}
    if MANY in asked:
        forced[FOR_MANY] = {**never, f"{kind}.{MANY}": asked[MANY].least}
    return forced


class _Call:
    """One weight, packed so that one kernel is taken."""

    def __init__(self, native: Any, linear: TunedLinear, rounding: str, crossovers: Mapping[str, int]) -> None:
        self._native, self._spec = native, linear.spec
        spec, fmt = linear.spec, format_spec(linear.fmt)
        raw = np.full(spec.out_features * spec.in_features // fmt.block_elements * fmt.block_bytes, FILL, np.uint8)
        self._packed = native.pack_linear(
            linear.fmt, [raw], [spec.out_features], spec.in_features, spec.dtype, None, rounding, crossovers
        )

    def seconds(self, rows: int) -> float:
        """Of the fastest of some calls with so many rows of activations."""
        from cardan_native import to_tensor

        values = np.random.default_rng(rows).normal(size=(rows, self._spec.in_features)).astype(np.float32)
        x = self._native.cast(to_tensor(self._native, values), self._spec.dtype)
        rounds = PROMPT_ROUNDS if rows in PROMPT_ROWS else ROUNDS
        return fastest(functools.partial(self._native.linear, x, self._packed), rounds)


def fastest(call: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest of so many calls; one before them is not counted."""
    call()
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return min(taken)


def _most_work(linears: Sequence[TunedLinear]) -> tuple[TunedLinear, ...]:
    """Some weights that most of the work is in, each size once."""
    counts = Counter(replace(x, spec=replace(x.spec, name=x.fmt)) for x in linears)
    ranked = sorted(counts, key=lambda x: counts[x] * x.spec.out_features * x.spec.in_features, reverse=True)[
        :SIZES_OF_A_MODEL
    ]
    return tuple(
        TunedLinear(x.fmt, replace(x.spec, out_features=min(x.spec.out_features, MOST_FEATURES))) for x in ranked
    )


@functools.cache
def _digest(path: str) -> str:
    """The first digits of a file's hash."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
