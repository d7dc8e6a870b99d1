"""Sampling on the device: the same token as the float64 reference, distributions, penalties, bias, masks, logprobs.

It knows no sampler; it drives a runner over a model whose logits it chose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cardan.ops import bounds
from cardan.ops.definitions import log_softmax
from cardan.platform import Feature
from cardan.references.logit_table import VOCAB
from cardan.references.sampling import Knobs, adjust, choose
from cardan.testing.conformance.check import Check, expect
from cardan.testing.conformance.logit_bench import LogitBench, make_table, sampling_batch
from cardan.testing.conformance.subject import Subject
from cardan.types import PenaltySeed

ROWS = 40
DRAWS = 50
"""Steps of ``ROWS`` draws from one distribution."""
CHI_SQUARE_LIMIT = 75.0
"""Of 31 degrees of freedom; fixed seeds, so it either holds or does not (0.00002 of good samplers exceed it)."""
OPEN_SHARE = 0.2
"""Most rows that may be too close to call."""

KNOBS: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.7},
    "high-temperature": {"temperature": 3.0},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "wide-top_k": {"temperature": 2.0, "top_k": 200},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "wide-top_p": {"temperature": 20.0, "top_p": 0.97},
    "tiny-top_p": {"temperature": 1.0, "top_p": 1e-6},
    "min_p": {"temperature": 1.5, "min_p": 0.1},
    "wide-min_p": {"temperature": 20.0, "min_p": 0.5},
    "all-filters": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.05},
}


def checks(subject: Subject) -> Iterator[Check]:
    """Checks of everything that samples; what a platform does not claim is skipped."""
    for name in KNOBS:
        yield _check(f"{name}-takes-the-reference-token", partial(_run_knobs, name=name))
    rest: Mapping[str, Callable[[Subject], None]] = {
        "tokens-follow-the-distribution": _run_distribution,
        "rows-of-all-kinds-in-one-batch": _run_mixed,
        "penalties": _run_penalties,
        "penalties-of-a-reused-row": _run_reused_row,
        "logit-bias": _run_bias,
        "logits-on-the-host": _run_host_logits,
        "grammar-mask": _run_mask,
        "a-row-of-nan-fails-alone": _run_nan,
        "logprobs": _run_logprobs,
        "the-last-token-stays-on-the-device": _run_last_token,
    }
    for name, run in rest.items():
        yield _check(name, run)


def _check(name: str, run: Callable[[Subject], None]) -> Check:
    return Check(part="sampler", name=name, run=run, needs_ops=False)


def _bench(subject: Subject, *features: Feature) -> LogitBench:
    subject.needs(*features)
    return LogitBench(subject)


def _ids(count: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return ((np.arange(count) * 37 + 11) % VOCAB).astype(np.int32)


def _hold(tokens: Any, wanted: list[int | None], what: str) -> None:
    """Compare tokens with those of the reference, where it is sure of them."""
    unsure = sum(token is None for token in wanted)
    expect(unsure <= OPEN_SHARE * len(wanted) + 1, f"{what}: the reference itself is unsure of {unsure} rows")
    wrong = [row for row, token in enumerate(wanted) if token is not None and int(tokens[row]) != token]
    if wrong:
        row = wrong[0]
        expect(
            False,
            f"{what}: {len(wrong)} of {len(wanted)} tokens differ from the reference, "
            f"first in row {row}: got {int(tokens[row])}, expected {wanted[row]}",
        )


def _run_knobs(subject: Subject, name: str) -> None:
    with _bench(subject, *(() if name == "greedy" else (Feature.SAMPLING,))) as bench:
        ids, sampling = _ids(ROWS), sampling_batch(ROWS, **KNOBS[name])
        result = bench.step(ids, sampling)
        wanted = [
            choose(bench.table[token], Knobs(seed=int(seed), **KNOBS[name]), int(position))
            for token, seed, position in zip(ids, sampling.seeds, sampling.positions, strict=True)
        ]
        _hold(result.tokens, wanted, name)
        expect(not result.failed.any(), f"{name}: rows are marked as failed whose logits are finite")


def _run_distribution(subject: Subject) -> None:
    """Draws with fixed seeds, against exact probabilities: the 31 likeliest tokens, and all others together."""
    with _bench(subject, Feature.SAMPLING) as bench:
        token, temperature = 7, 0.8
        probabilities = np.exp(log_softmax(bench.table[token] / temperature))
        counts = np.zeros(VOCAB)
        for step in range(DRAWS):
            seeds = np.arange(ROWS, dtype=np.uint64) + np.uint64(step * 100_003)
            sampling = sampling_batch(ROWS, temperature=temperature, seeds=seeds)
            tokens = bench.step(np.full(ROWS, token, np.int32), sampling).tokens
            counts += np.bincount(tokens, minlength=VOCAB)
        likely = np.argsort(-probabilities)[:31]
        observed = np.append(counts[likely], counts.sum() - counts[likely].sum())
        expected = np.append(probabilities[likely], 1.0 - probabilities[likely].sum()) * counts.sum()
        chi_square = float(((observed - expected) ** 2 / expected).sum())
        expect(
            chi_square < CHI_SQUARE_LIMIT,
            f"{int(counts.sum())} draws do not follow softmax(logits / temperature): chi-square {chi_square:.0f}, "
            f"expected below {CHI_SQUARE_LIMIT:.0f}",
        )


def _run_mixed(subject: Subject) -> None:
    with _bench(subject, Feature.SAMPLING) as bench:
        kinds = [Knobs(seed=50 + index, **changes) for index, changes in enumerate(KNOBS.values())]
        count = len(kinds)
        sampling = sampling_batch(
            count,
            temperature=np.array([kind.temperature for kind in kinds], np.float32),
            top_k=np.array([VOCAB if kind.top_k < 1 else kind.top_k for kind in kinds], np.int32),
            top_p=np.array([kind.top_p for kind in kinds], np.float32),
            min_p=np.array([kind.min_p for kind in kinds], np.float32),
            seeds=np.array([kind.seed for kind in kinds], np.uint64),
        )
        ids = _ids(count)
        tokens = bench.step(ids, sampling).tokens
        wanted = [
            choose(bench.table[token], kind, int(position))
            for token, kind, position in zip(ids, kinds, sampling.positions, strict=True)
        ]
        _hold(tokens, wanted, "rows of all kinds in one batch")


_PENALTIES = (
    Knobs(frequency_penalty=0.9),
    Knobs(presence_penalty=1.5),
    Knobs(repetition_penalty=1.4),
    Knobs(frequency_penalty=-0.5, presence_penalty=0.7, repetition_penalty=0.8),
    Knobs(),
)


def _run_penalties(subject: Subject) -> None:
    """Rows that step over the same logits, so that only what was counted can change their tokens."""
    with _bench(subject, Feature.PENALTIES) as bench:
        _penalized_steps(bench, rows=None)


def _run_reused_row(subject: Subject) -> None:
    """The same rows again for new requests: nothing is left of the old counts."""
    with _bench(subject, Feature.PENALTIES) as bench:
        _penalized_steps(bench, rows=None)
        _penalized_steps(bench, rows=np.array([3, 1, 2, 5, 4], np.int32))


def _penalized_steps(bench: LogitBench, rows: Any) -> None:
    count = len(_PENALTIES)
    ids = _ids(count)
    best = np.argsort(-bench.table[ids], axis=1)[:, :4]
    prompts = [[int(best[row, 1]), 3, 4] for row in range(count)]
    outputs = [[int(best[row, 0]), int(best[row, 2]), int(best[row, 0])] for row in range(count)]
    fields = {
        name: np.array([getattr(kind, name) for kind in _PENALTIES], np.float32)
        for name in ("frequency_penalty", "presence_penalty", "repetition_penalty")
    }
    row_ids = np.arange(1, count + 1, dtype=np.int32) if rows is None else rows
    seeds = tuple(_penalty_seed(int(row_ids[row]), prompts[row], outputs[row]) for row in range(count - 1))
    for step in range(5):
        sampling = sampling_batch(count, row_ids=row_ids, penalty_seeds=seeds if step == 0 else (), **fields)
        tokens = bench.step(ids, sampling).tokens
        wanted = [
            choose(adjust(bench.table[ids[row]], kind, prompts[row], outputs[row]), kind, 0)
            for row, kind in enumerate(_PENALTIES)
        ]
        _hold(tokens, wanted, f"penalties, step {step}")
        for row in range(count):
            outputs[row].append(int(tokens[row]))


def _penalty_seed(row_id: int, prompt: list[int], output: list[int]) -> PenaltySeed:
    ids, counts = np.unique(np.asarray(output, np.int32), return_counts=True)
    return PenaltySeed(
        row_id=row_id,
        prompt_ids=np.unique(np.asarray(prompt, np.int32)),
        output_ids=ids,
        output_counts=counts.astype(np.int32),
    )


def _run_bias(subject: Subject) -> None:
    with _bench(subject, Feature.LOGIT_BIAS) as bench:
        ids = _ids(3)
        best = np.argsort(-bench.table[ids], axis=1)
        # row 0: its best token is forbidden; row 1: another is forced; row 2: nothing, the row between must not leak
        sampling = sampling_batch(
            3,
            bias_index=np.array([0, 1, 0], np.int32),
            bias_ids=np.array([best[0, 0], 5, best[0, 1]], np.int32),
            bias_values=np.array([-np.inf, 100.0, -np.inf], np.float32),
        )
        result = bench.step(ids, sampling)
        _hold(result.tokens, [int(best[0, 2]), 5, int(best[2, 0])], "logit bias")
        expect(not result.failed.any(), "logit bias: a row with allowed tokens left is marked as failed")
        everything = sampling_batch(
            1,
            bias_index=np.zeros(VOCAB, np.int32),
            bias_ids=np.arange(VOCAB, dtype=np.int32),
            bias_values=np.full(VOCAB, -np.inf, np.float32),
        )
        expect(
            bool(bench.step(ids[:1], everything).failed[0]), "a row that forbids every token is not marked as failed"
        )


def _run_host_logits(subject: Subject) -> None:
    """Some rows' logits come to the host, and others' are given; rows beside them, and logprobs, stay the model's."""
    with _bench(subject, Feature.HOST_LOGITS, Feature.LOGIT_BIAS) as bench:
        ids, rows = _ids(5), [3, 1]
        wants = np.full(5, subject.capabilities.supports(Feature.LOGPROBS))
        sampling = sampling_batch(5, want_logprobs=wants)
        step = bench.open(ids, sampling)
        shown = step.logits(rows)
        expect(shown.shape == (2, VOCAB), f"logits of 2 rows have the shape {list(shown.shape)}")
        error = float(np.abs(shown - bench.table[ids[rows]]).max())
        expect(error <= 1e-5 * float(np.abs(bench.table).max()), f"logits on the host are off by {error:.2e}")
        given = np.stack((np.arange(VOCAB), -shown[0])).astype(np.float32)
        changed = replace(
            sampling,
            given_logits=(np.array([0, 3], np.int32), given),
            bias_index=np.zeros(1, np.int32),
            bias_ids=np.array([VOCAB - 1], np.int32),
            bias_values=np.array([-np.inf], np.float32),
        )
        shown[:] = 0
        step.sample(changed)
        result = step.result()
        best = bench.table[ids].argmax(axis=1)
        least = int(bench.table[ids[3]].argmin())
        _hold(result.tokens, [VOCAB - 2, int(best[1]), int(best[2]), least, int(best[4])], "given logits")
        if wants.any():
            wanted = log_softmax(bench.table[ids[3]])[least]
            entry = result.logprobs[3]
            expect(
                entry is not None and abs(entry.logprob - wanted) <= 1e-3,
                f"the logprob of a token by given logits is {entry}, expected the model's own {wanted:.4f}",
            )


def _run_mask(subject: Subject) -> None:
    with _bench(subject, Feature.GRAMMAR_MASK) as bench:
        ids = _ids(4)
        rng = np.random.default_rng(3)
        allowed = rng.random((4, VOCAB)) < 0.1
        bits = np.zeros((4, -(-VOCAB // 32) * 32), np.uint32)
        bits[:, :VOCAB] = allowed
        mask = (bits.reshape(4, -1, 32) << np.arange(32, dtype=np.uint32)).sum(axis=-1).astype(np.uint32)
        has_mask = np.array([True, False, True, True])
        result = bench.step(ids, sampling_batch(4, has_mask=has_mask), mask)
        scores = np.where(allowed | ~has_mask[:, None], bench.table[ids], -np.inf)
        _hold(result.tokens, scores.argmax(axis=1).tolist(), "grammar mask")


def _run_nan(subject: Subject) -> None:
    table = make_table(subject.best_dtype)
    table[11, VOCAB - 1] = np.nan
    with LogitBench(subject, table) as bench:
        ids = np.array([5, 11, 6], np.int32)
        for changes in ({}, {"temperature": 1.0, "top_p": 0.9}):
            if changes and not subject.capabilities.supports(Feature.SAMPLING):
                continue
            result = bench.step(ids, sampling_batch(3, **changes))
            expect(
                result.failed.tolist() == [False, True, False],
                f"rows marked as failed are {result.failed.tolist()}, expected only the one whose logits hold NaN",
            )


def _run_logprobs(subject: Subject) -> None:
    with _bench(subject, Feature.LOGPROBS) as bench:
        ids = _ids(4)
        sampling = sampling_batch(
            4,
            want_logprobs=np.array([True, True, False, True]),
            top_logprobs=np.array([5, 0, 0, 20], np.int32),
            logprob_token_ids=((3, 9), (), (), (1,)),
        )
        result = bench.step(ids, sampling)
        want = log_softmax(bench.table[ids])
        tried = bounds.Tried((bench.table[ids],), (want,), "float32")
        allowed = np.broadcast_to(bounds.log_softmax(tried)[0], want.shape)
        expect(result.logprobs[2] is None, "a row that wants no logprobs got some")
        for row, named in ((0, (3, 9)), (1, ()), (3, (1,))):
            entry = result.logprobs[row]
            expect(entry is not None, f"row {row} wants logprobs and got None")
            pairs = [(int(result.tokens[row]), entry.logprob), *entry.top, *entry.chosen]
            off = max(float(abs(value - want[row, token]) / allowed[row, token]) for token, value in pairs)
            expect(
                off <= 1,
                f"logprobs of row {row} are off by {off:.3g} times what rounding explains, expected those of the "
                "model's own logits",
            )
            order = np.argsort(-want[row], kind="stable")[: len(entry.top)]
            expect(len(entry.top) == int(sampling.top_logprobs[row]), f"row {row} got {len(entry.top)} alternatives")
            expect(
                [token for token, _ in entry.top] == order.tolist(), f"alternatives of row {row} are not the likeliest"
            )
            expect(tuple(token for token, _ in entry.chosen) == named, f"row {row} wants logprobs of {named}")


def _run_last_token(subject: Subject) -> None:
    """``-1`` stands for what the row sampled last, whatever rows the next step has, read or not."""
    with _bench(subject) as bench:
        rows = np.array([4, 2, 9], np.int32)
        ids = _ids(3)
        first = bench.launch(ids, sampling_batch(3, row_ids=rows))
        second = bench.launch(np.full(3, -1, np.int32), sampling_batch(3, row_ids=rows[::-1].copy()), position=1)
        tokens, after = first.result().tokens, second.result().tokens
        wanted = bench.table[tokens[::-1]].argmax(axis=1)
        _hold(after, wanted.tolist(), "tokens that stay on the device")
