"""One step under way: samples when asked, hands back what it gave when waited for.

It knows no model: logits are there when it is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cardan.platform import Fetch, Step
from cardan.runner.logprobs import LogprobFetch, Wanted
from cardan.runner.pooling import HiddenFetch, PooledFetch
from cardan.runner.recorded_sampling import Kind
from cardan.runner.sampler import Mask, Sampled
from cardan.types import Array, Float32Array, SamplingBatch, StepResult, TokenLogprobs

if TYPE_CHECKING:
    from cardan.runner.runner import NeutralRunner


class NeutralStep(Step):
    """A step of the neutral runner."""

    def __init__(
        self,
        runner: NeutralRunner,
        state: tuple[Array | None, Array | None, Kind | None],
        sampling: SamplingBatch | None,
        prompt: tuple[Sequence[LogprobFetch], PooledFetch | None, HiddenFetch | None],
        *,
        replayed: bool = False,
    ) -> None:
        """Hold a launched step.

        Args:
            runner: that launched it, and keeps the rows' last tokens.
            state: of the rows that sample, hidden states ``[n, hidden]`` and logits float32 ``[n, vocab]``, or None
                where none does; and where logits are recorded with the sampling, and so not there yet, its kind.
            sampling: their sampling state, or None.
            prompt: logprobs of prompt positions under way, block by block, sums of hidden states, or None, and hidden
                states, or None.
            replayed: whether the forward pass was replayed from a captured one.
        """
        self._replayed = replayed
        self._runner = runner
        self._hidden, self._logits, self._kind = state
        self._sampling = sampling
        self._prompt = tuple(prompt[0])
        self._pooled, self._states = prompt[1:]
        self._tokens: Fetch | None = None
        self._logprobs: LogprobFetch | None = None
        self._logprob_rows: list[int] = []
        self._result: StepResult | None = None

    @property
    def replayed(self) -> bool:
        """See ``Step.replayed``."""
        return self._replayed

    def sample(self, sampling: SamplingBatch | None = None, mask: Mask | None = None) -> None:
        """See ``Step.sample``."""
        late = sampling is not None
        sampling = sampling or self._sampling
        if self._hidden is None or sampling is None:
            return
        runner = self._runner
        with runner.device.scope():
            kind = None if late or mask is not None else self._kind
            sampled = self._sample_recorded(kind, sampling) or self._sample(sampling, mask)
            self._tokens = runner.device.fetch((sampled.tokens, sampled.failed))
            self._fetch_logprobs(sampling, sampled.tokens)
        self._hidden = self._logits = None

    def logits(self, rows: Sequence[int]) -> Float32Array:
        """See ``Step.logits``."""
        assert self._hidden is not None, "rows sample, and have not yet"
        device = self._runner.device
        with device.scope():
            self.hold()
            index = device.ops.from_host(np.asarray(rows, dtype=np.int32))
            (found,) = device.fetch((device.ops.gather_rows(self._logits, index),)).wait()
        return np.array(found, dtype=np.float32)

    def hold(self) -> None:
        """Compute the logits of a step that has not sampled yet, before a replay overwrites what they are made of."""
        if self._hidden is not None and self._logits is None:
            self._logits = self._runner.head(self._hidden)
            self._kind = None

    def _sample_recorded(self, kind: Kind | None, sampling: SamplingBatch) -> Sampled | None:
        if kind is None:
            return None
        self._logits, sampled = self._runner.sample_recorded(kind, self._hidden, sampling)
        return sampled

    def _sample(self, sampling: SamplingBatch, mask: Mask | None) -> Sampled:
        runner = self._runner
        self.hold()
        logits = self._logits
        if sampling.given_logits is not None:
            ops = runner.device.ops
            logits = ops.scatter_rows(ops.scale(logits, 1.0), *map(ops.from_host, sampling.given_logits))
        sampled = runner.sampler.sample(logits, sampling, mask)
        runner.remember(sampling.row_ids, sampled.tokens)
        return sampled

    def _fetch_logprobs(self, sampling: SamplingBatch, tokens: Array) -> None:
        if not sampling.want_logprobs.any():
            return
        rows = np.flatnonzero(sampling.want_logprobs).astype(np.int32)
        ops = self._runner.device.ops
        index = ops.from_host(rows)
        ids = sampling.logprob_token_ids
        wanted = Wanted(sampling.top_logprobs[rows], tuple(ids[row] if row < len(ids) else () for row in rows))
        self._logprob_rows = [int(row) for row in rows]
        targets = ops.reshape(ops.gather_rows(tokens, index), (-1, 1))
        self._logprobs = LogprobFetch(
            ops, self._runner.device.fetch, ops.gather_rows(self._logits, index), targets, wanted
        )

    def result(self) -> StepResult:
        """See ``Step.result``."""
        if self._result is None:
            self._result = self._read()
        return self._result

    def _read(self) -> StepResult:
        prompt = tuple(entry for block in self._prompt for entry in block.wait())
        pooled = None if self._pooled is None else self._pooled.wait()
        hidden = None if self._states is None else self._states.wait()
        if self._tokens is None:
            empty = np.zeros(0, dtype=np.int32)
            failed = empty.astype(np.bool_)
            return StepResult(tokens=empty, failed=failed, prompt_logprobs=prompt, pooled=pooled, hidden=hidden)
        tokens, failed = self._tokens.wait()
        logprobs: list[TokenLogprobs | None] = []
        if self._logprobs is not None:
            logprobs = [None] * len(tokens)
            for row, entry in zip(self._logprob_rows, self._logprobs.wait(), strict=True):
                logprobs[row] = None if failed[row] else entry
        return StepResult(
            tokens=tokens.astype(np.int32, copy=False),
            failed=failed.astype(np.bool_, copy=False),
            logprobs=tuple(logprobs),
            prompt_logprobs=prompt,
            pooled=pooled,
            hidden=hidden,
        )
