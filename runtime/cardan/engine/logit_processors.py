"""Functions of installed packages that say, before each token of a request, what is added to which tokens' logits.

No code ever comes from a request: it names a processor and gives its parameters as JSON. It knows no device.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cardan.errors import RequestError
from cardan.plugins import EntryPointLike, describe_error, installed, load_guarded
from cardan.scheduler import Request, Scheduled
from cardan.types import SamplingBatch

GROUP = "cardan.logit_processors"
"""Entry-point group: each names a factory."""

LogitProcessor: TypeAlias = Callable[[Sequence[int], Sequence[int]], Mapping[int, float]]
"""Takes the ids of the prompt and of the output so far, and gives what is added to the logits of the next token, by
token id; ``-inf`` forbids one. It is called in the scheduler's process, which does nothing else meanwhile."""

LogitProcessorFactory: TypeAlias = Callable[[Mapping[str, Any]], LogitProcessor]
"""Makes a processor for one choice of a request from its parameters; a ``ValueError`` says what is wrong with them."""

PARAM = "custom_logit_processor"

logger = logging.getLogger(__name__)


class LogitProcessors:
    """The installed processors, and what they say of the rows of a step."""

    def __init__(self, vocab_size: int, entry_points: Iterable[EntryPointLike] | None = None) -> None:
        """Find them; one is imported when a request first names it.

        Args:
            vocab_size: of the model.
            entry_points: taken instead of those installed.
        """
        self._vocab_size = vocab_size
        self._plugins = {plugin.name: plugin for plugin in installed(GROUP, entry_points)}
        self._factories: dict[str, LogitProcessorFactory] = {}
        self._failed: list[tuple[str, str]] = []

    def make(self, name: str, params: str) -> LogitProcessor:
        """A processor for one choice.

        Args:
            name: of its entry point.
            params: an object as JSON.

        Raises:
            RequestError: there is none of that name, it does not load, or it does not take the parameters.
        """
        try:
            return self._factory(name)(json.loads(params))
        except RequestError:
            raise
        except Exception as error:
            raise RequestError(
                f"The logit processor {name!r} does not take these parameters: {describe_error(error)}.", param=PARAM
            ) from error

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
        return any(request.processor is not None for request in scheduled.requests)

    def biased(self, scheduled: Scheduled) -> SamplingBatch:
        """A step's sampling with what the processors say, once everything before it was committed."""
        sampling = scheduled.batch.sampling
        assert sampling is not None, "a row with a processor samples"
        index, ids, values = [sampling.bias_index], [sampling.bias_ids], [sampling.bias_values]
        for row, request in enumerate(scheduled.requests):
            if request.processor is not None:
                said = self._ask(request)
                index.append(np.full(len(said), row, dtype=np.int32))
                ids.append(np.fromiter(said, dtype=np.int32, count=len(said)))
                values.append(np.fromiter(said.values(), dtype=np.float32, count=len(said)))
        return dataclasses.replace(
            sampling, **_joined(np.concatenate(index), np.concatenate(ids), np.concatenate(values))
        )

    def take_failed(self) -> list[tuple[str, str]]:
        """Ids of requests whose processor failed since the last call, and why."""
        failed, self._failed = self._failed, []
        return failed

    def _ask(self, request: Request) -> dict[int, float]:
        assert request.processor is not None
        try:
            prompt = [] if request.embeds is not None else request.prompt.tolist()
            said = request.processor(prompt, tuple(request.output_ids))
            return {int(token): self._checked(int(token), float(value)) for token, value in said.items()}
        except Exception as error:
            logger.warning("a logit processor failed", exc_info=error)
            request.processor = None
            why = f"Its logit processor failed, so the request was ended: {describe_error(error)}"
            self._failed.append((request.rid, why))
            return {}

    def _checked(self, token: int, value: float) -> float:
        if not 0 <= token < self._vocab_size:
            raise ValueError(f"token ids are between 0 and {self._vocab_size - 1}, got {token}")
        if math.isnan(value) or value > 1e6:
            raise ValueError(f"what is added to a logit is a number up to 1e6, got {value} for token {token}")
        return value


def _joined(index: Any, ids: Any, values: Any) -> dict[str, Any]:
    """Biases row by row, those of one token of a row added up."""
    keys = index.astype(np.int64) << 32 | ids
    unique, places = np.unique(keys, return_inverse=True)
    sums = np.zeros(len(unique), dtype=np.float64)
    np.add.at(sums, places, values)
    return {
        "bias_index": (unique >> 32).astype(np.int32),
        "bias_ids": (unique & 0xFFFFFFFF).astype(np.int32),
        "bias_values": sums.astype(np.float32),
    }


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
