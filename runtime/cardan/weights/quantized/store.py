"""Tensors of a store, those of quantized linears put together.

It knows no method: a ``Reader`` says what belongs together.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from cardan.types import TensorView
from cardan.weights.checkpoint import TensorStore
from cardan.weights.quantized.module import Entry, Module, Packed
from cardan.weights.quantized.reader import Reader


class QuantizedStore:
    """A ``TensorStore`` over another.

    Attributes:
        notes: the method, for people.
    """

    def __init__(self, store: TensorStore, reader: Reader) -> None:
        """Look through a store.

        Raises:
            CheckpointError: tensors of a linear do not fit together.
        """
        self._store = store
        info = store.info()
        self._packed: dict[str, Packed] = {}
        taken: set[str] = set()
        for name, entry in info.items():
            suffix = next((end for end in reader.codes if name.endswith(end)), None)
            if suffix is None:
                continue
            module = name.removesuffix(suffix)
            if reader.takes(module, suffix, entry):
                ends = (suffix, *reader.parts, *reader.beside)
                found = {end: info[module + end] for end in ends if module + end in info}
                read = partial(self._part, module)
                self._packed[reader.target(module)] = reader.describe(Module(module, found, read))
                taken |= {module + end for end in found if end not in reader.beside}
        described = {name: (packed.fmt, packed.shape) for name, packed in self._packed.items()}
        self._info = {name: entry for name, entry in info.items() if name not in taken} | described
        self.notes = (f"the checkpoint is quantized: {reader.summary}, in {len(self._packed)} linears",)

    def info(self) -> Mapping[str, Entry]:
        """Format and logical shape of every tensor by name."""
        return self._info

    def tensor(self, name: str) -> TensorView:
        """A tensor; one that was put together is a copy.

        Raises:
            CheckpointError: scales are not finite, or indexes are not what they must be.
        """
        packed = self._packed.get(name)
        return self._store.tensor(name) if packed is None else packed.view(name)

    def close(self) -> None:
        """Give up the files."""
        self._store.close()

    def _part(self, module: str, suffix: str) -> TensorView:
        return self._store.tensor(module + suffix)
