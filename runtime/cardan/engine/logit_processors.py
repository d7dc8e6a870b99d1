"""Functions of installed packages that change, before each token of a request, the logits that it is sampled from.

No code ever comes from a request: it names a processor and gives its parameters as JSON. It knows no device.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cardan.engine.validation import UNSUPPORTED
from cardan.errors import RequestError
from cardan.platform import Step
from cardan.plugins import EntryPointLike, describe_error, installed, load_guarded
from cardan.scheduler import Request, RequestState, Scheduled, as_float32
from cardan.types import Float32Array, Int32Array, SamplingBatch

GROUP = "cardan.logit_processors"
"""Entry-point group: each names a factory."""

LogitProcessor: TypeAlias = Callable[..., Any]
"""Takes the ids of the prompt and of the output so far, and gives what is added to the logits of the next token, by
token id; ``-inf`` forbids one.

One with an attribute ``sees_logits`` that is true takes the model's logits too, float32 ``[vocab]``, which it may
change, and gives the logits that count instead. Both are called in the scheduler's process, which does nothing else
meanwhile."""

LogitProcessorFactory: TypeAlias = Callable[[Mapping[str, Any]], LogitProcessor]
"""Makes a processor for one choice of a request from its parameters; a ``ValueError`` says what is wrong with them."""

Given: TypeAlias = tuple[int, Float32Array]
"""A row of a step, and the logits that count there."""

LARGEST = 1e6
"""Most that may be added to a logit, and the largest logit that may be given."""

PARAM = "custom_logit_processor"

logger = logging.getLogger(__name__)


class LogitProcessors:
    """The installed processors, and what they say of the rows of a step."""

    def __init__(
        self, vocab_size: int, entry_points: Iterable[EntryPointLike] | None = None, *, hidden: str | None = None
    ) -> None:
        """Find them; one is imported when a request first names it.

        Args:
            vocab_size: of the model.
            entry_points: taken instead of those installed.
            hidden: why the platform shows no logits, or None where it does.
        """
        self._vocab_size = vocab_size
        self._hidden = hidden
        self._plugins = {plugin.name: plugin for plugin in installed(GROUP, entry_points)}
        self._factories: dict[str, LogitProcessorFactory] = {}
        self._failed: list[tuple[str, str]] = []

    def make(self, name: str, params: str) -> LogitProcessor:
        """A processor for one choice.

        Args:
            name: of its entry point.
            params: an object as JSON.

        Raises:
            RequestError: there is none of that name, it does not load, it does not take the parameters, or it needs
                logits that the platform does not show.
        """
        try:
            processor = self._factory(name)(json.loads(params))
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"The logit processor {name!r} does not take these parameters: {describe_error(error)}.", param=PARAM
            ) from error
        if _sees_logits(processor) and self._hidden is not None:
            raise RequestError(
                f"The logit processor {name!r} sees logits, which this platform does not show: {self._hidden}. Name "
                "one that does not, or serve the model on another platform.",
                param=PARAM,
                code=UNSUPPORTED,
            )
        return processor

    def _factory(self, name: str) -> LogitProcessorFactory:
        found = self._factories.get(name)
        if found is not None:
            return found
        plugin = self._plugins.get(name)
        if plugin is None:
            known = ", ".join(sorted(self._plugins)) or "none"
            raise RequestError(
                f"There is no logit processor {name[:60]!r}. Installed: {known}. Processors are packages with an entry "
                f"point in the group {GROUP}; code in a request is never run.",
                param=PARAM,
            )
        loaded = load_guarded(plugin)
        if loaded.error is not None or not callable(loaded.value):
            why = "it is not callable" if loaded.error is None else describe_error(loaded.error)
            raise RequestError(
                f"The logit processor {name!r} of {plugin.origin} cannot be loaded: {why}. Mend that package.",
                param=PARAM,
            )
        factory: LogitProcessorFactory = loaded.value
        self._factories[name] = factory
        return factory

    @staticmethod
    def concern(scheduled: Scheduled) -> bool:
        """Whether a row of a step has a processor."""
        return any(map(_has_processor, scheduled.requests))

    def processed(self, scheduled: Scheduled, step: Step) -> SamplingBatch:
        """A step's sampling with what the processors say, once everything before it was committed.

        Only where a processor sees logits is the step waited for, and only the logits of such rows are copied.
        """
        sampling = scheduled.batch.sampling
        assert sampling is not None, "a row with a processor samples"
        rows = [(row, one) for row, one in enumerate(scheduled.requests) if _has_processor(one)]
        seeing = [(row, one) for row, one in rows if _sees_logits(one.processor)]
        biases = [(row, self._ask_biases(one)) for row, one in rows if not _sees_logits(one.processor)]
        changes = _joined(sampling, biases) if biases else {}
        if seeing:
            shown = step.logits([row for row, _ in seeing])
            answers = [(row, self._ask_logits(one, of_row)) for (row, one), of_row in zip(seeing, shown, strict=True)]
            changes["given_logits"] = _stacked([(row, logits) for row, logits in answers if logits is not None])
        return dataclasses.replace(sampling, **changes)

    def take_failed(self) -> list[tuple[str, str]]:
        """Ids of requests whose processor failed since the last call, and why."""
        failed, self._failed = self._failed, []
        return failed

    def _ask_biases(self, request: Request) -> dict[int, float]:
        try:
            said = _call(request)
            return {int(token): self._checked_bias(int(token), float(value)) for token, value in said.items()}
        except Exception as error:  # noqa: BLE001 - whatever a package raises ends its request, not the server
            self._note_failure(request, error)
            return {}

    def _ask_logits(self, request: Request, shown: Float32Array) -> Float32Array | None:
        try:
            return self._checked_logits(_call(request, shown))
        except Exception as error:  # noqa: BLE001 - whatever a package raises ends its request, not the server
            self._note_failure(request, error)
            return None

    def _note_failure(self, request: Request, error: Exception) -> None:
        logger.warning("a logit processor failed", exc_info=error)
        request.processor = None
        why = f"Its logit processor failed, so the request was ended: {describe_error(error)}"
        self._failed.append((request.rid, why))

    def _checked_bias(self, token: int, value: float) -> float:
        if not 0 <= token < self._vocab_size:
            raise ValueError(f"token ids are between 0 and {self._vocab_size - 1}, got {token}")
        if not value <= LARGEST:
            raise ValueError(f"what is added to a logit is a number up to 1e6, got {value} for token {token}")
        return value

    def _checked_logits(self, said: Any) -> Float32Array:
        if not isinstance(said, np.ndarray) or said.shape != (self._vocab_size,) or said.dtype != np.float32:
            got = f"{said.dtype} {list(said.shape)}" if isinstance(said, np.ndarray) else type(said).__name__
            raise ValueError(f"it must return the logits, a numpy array float32 [{self._vocab_size}], got {got}")
        if not (said <= LARGEST).all():
            raise ValueError("logits are numbers up to 1e6; -inf forbids a token")
        if said.max() == -np.inf:
            raise ValueError("it forbids every token")
        return said


def _has_processor(request: Request) -> bool:
    """Whether somebody has a say in a row's next token; one that has ended drops it."""
    return request.processor is not None and request.state is not RequestState.FINISHED


def _sees_logits(processor: LogitProcessor | None) -> bool:
    return bool(getattr(processor, "sees_logits", False))


def _call(request: Request, *more: Float32Array) -> Any:
    assert request.processor is not None
    prompt = [] if request.embeds is not None else request.prompt.tolist()
    return request.processor(prompt, tuple(request.output_ids), *more)


def _joined(sampling: SamplingBatch, biases: Sequence[tuple[int, Mapping[int, float]]]) -> dict[str, Any]:
    """A step's biases with those of some rows, row by row, those of one token of a row added up."""
    index, ids, values = [sampling.bias_index], [sampling.bias_ids], [sampling.bias_values]
    for row, said in biases:
        index.append(np.full(len(said), row, dtype=np.int32))
        ids.append(np.fromiter(said, dtype=np.int32, count=len(said)))
        values.append(as_float32(said.values()))
    keys = np.concatenate(index).astype(np.int64) << 32 | np.concatenate(ids)
    unique, places = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(unique), dtype=np.float64)
    np.add.at(sums, places, np.concatenate(values))
    return {
        "bias_index": (unique >> 32).astype(np.int32),
        "bias_ids": (unique & 0xFFFFFFFF).astype(np.int32),
        "bias_values": as_float32(sums),
    }


def _stacked(given: Sequence[Given]) -> tuple[Int32Array, Float32Array] | None:
    if not given:
        return None
    return np.array([row for row, _ in given], dtype=np.int32), np.stack([logits for _, logits in given])


def read_processor(value: Any) -> tuple[str, str] | None:
    """Name and parameters (as JSON) from a request's field: a name, or an object with ``name`` and ``params``.

    Raises:
        RequestError: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        value = {"name": value}
    wrong = not isinstance(value, Mapping) or not isinstance(value.get("name"), str) or set(value) - {"name", "params"}
    if wrong or not isinstance(value.get("params", {}), Mapping):
        raise RequestError(
            f'{PARAM} must be the name of an installed processor, or an object like {{"name": "…", "params": {{}}}}.',
            param=PARAM,
        )
    return value["name"], json.dumps(value.get("params", {}))
