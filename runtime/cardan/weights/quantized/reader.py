"""What a method of quantization says of a checkpoint: which tensors are codes, and what they are with their scales.

It reads no file and knows no method.
"""

from __future__ import annotations

import abc

from cardan.weights.quantized.module import Entry, Module, Packed


class Reader(abc.ABC):
    """One method, with the settings of one checkpoint.

    Attributes:
        codes: what the names of tensors with codes end in.
        parts: what the names of tensors that belong to them end in.
        beside: what the names of tensors end in that are looked at with them, and stay tensors of their own.
        summary: the method and its settings, for people.
    """

    codes: tuple[str, ...]
    parts: tuple[str, ...]
    beside: tuple[str, ...] = ()
    summary: str

    def takes(self, module: str, suffix: str, entry: Entry) -> bool:
        """Whether a tensor named ``module + suffix`` with one of the endings of ``codes`` is codes."""
        return True

    @abc.abstractmethod
    def describe(self, module: Module) -> Packed:
        """A linear as one tensor.

        Raises:
            CheckpointError: its tensors do not fit together, or it is of a kind that Cardan does not read.
        """

    def target(self, module: str) -> str:
        """Name of the tensor that a module's parts become."""
        return f"{module}.weight"
