"""The fake token of the null platform: a pure function of a sequence and of how its next token is chosen.

It knows no slots, tables or batches, so tests compute with it what a sequence gives when it runs alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from cardan.types import SamplingBatch, SamplingParams, TokenLogprobs

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FORCE_BIAS = 50.0
"""A logit bias at least this large forces its token; one at most the negative forbids it."""
_EOS_KEY = 0xE05
_NUM_CANDIDATES = 64
"""Candidates with a rank of their own; all other tokens are less likely than these."""
_NEAR = 2.0
"""A random choice among given logits takes a token this close to the largest."""


def mix(*values: int) -> int:
    """Hash integers into 64 bits. Source: the splitmix64 finalizer (Steele, Lea and Flood, 2014), chained."""
    state = 0
    for value in values:
        state = (state + (value & _BITS) + _GOLDEN) & _BITS
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _BITS
        state ^= state >> 31
    return state


def mix_arrays(*columns: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """``mix`` of each row of some columns, ``uint64 [n]`` each."""
    state = np.zeros(columns[0].shape, np.uint64)
    for column in columns:
        state = state + column + np.uint64(_GOLDEN)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state ^= state >> np.uint64(31)
    return state


def _weights(length: int) -> npt.NDArray[np.uint64]:
    state = np.arange(1, length + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state | np.uint64(1)


class SequenceHasher:
    """Hashes token sequences in order; one token moved, lost or changed gives another hash."""

    def __init__(self) -> None:
        self._weights = _weights(0)
        self._sums = np.zeros(1, np.uint64)

    def __call__(self, ids: npt.ArrayLike) -> int:
        """Hash ``ids: int [n]`` into 64 bits."""
        tokens = np.atleast_2d(np.asarray(ids, np.int64))
        return int(self.rows(tokens, np.array([tokens.shape[1]]))[0])

    def rows(self, tokens: npt.NDArray[np.int64], lengths: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
        """Hash the first ``lengths: int [n]`` of each row of ``tokens: int64 [n, width]``; returns ``uint64 [n]``.

        Tokens beyond the length must be 0.
        """
        width = tokens.shape[1]
        if width > self._weights.size:
            self._weights = _weights(2 * width)
            self._sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(self._weights)))
        # Each token counts as itself plus one, so that zeros at the end of a sequence count too.
        totals = tokens.view(np.uint64) @ self._weights[:width] + self._sums[lengths]
        return mix_arrays(totals, lengths.astype(np.uint64))


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """Which tokens there are.

    Attributes:
        size: ids are ``0 .. size - 1``.
        eos_ids: ids that end a sequence; they come with ``eos_probability`` and never otherwise.
        eos_probability: chance of an end at each position.
    """

    size: int
    eos_ids: tuple[int, ...] = ()
    eos_probability: float = 0.0

    @property
    def eos_threshold(self) -> int:
        """A sequence ends where 64 random bits are below this."""
        return int(self.eos_probability * 2.0**64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """How one token is chosen.

    Attributes:
        temperature: 0 takes the most likely candidate.
        top_k: 1 does so too.
        top_p: mixed into the choice when it is random.
        min_p: mixed into the choice when it is random.
        seed: of the request.
        position: of the token being chosen.
        penalties: frequency, presence and repetition penalty.
        prompt_ids: distinct ids of the prompt, for penalties.
        output_counts: how often each id was output, for penalties.
        bias: logit bias by token id; large ones force or forbid their token, others change the choice.
        allowed: what a grammar mask says of an id, or None for no mask.
        given: logits ``[vocab]`` that stand in the place of the made-up ones, or None.
    """

    temperature: float = 0.0
    top_k: int = -1
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    position: int = 0
    penalties: tuple[float, float, float] = (0.0, 0.0, 1.0)
    prompt_ids: frozenset[int] = frozenset()
    output_counts: Mapping[int, int] = field(default_factory=dict)
    bias: Mapping[int, float] = field(default_factory=dict)
    allowed: Callable[[int], bool] | None = None
    given: npt.NDArray[np.float32] | None = None


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def _scores(sequence_hash: int, choice: Choice) -> int:
    """What stands for the logits after penalties and bias: a hash that each of them changes."""
    scores = sequence_hash
    mild = sorted((token, value) for token, value in choice.bias.items() if 0 < abs(value) < _FORCE_BIAS)
    if mild:
        scores = mix(scores, *(part for token, value in mild for part in (token, _float_bits(value))))
    if choice.penalties == (0.0, 0.0, 1.0):
        return scores
    counts = [mix(token, count) for token, count in sorted(choice.output_counts.items()) if count > 0]
    bits = [_float_bits(penalty) for penalty in choice.penalties]
    return mix(scores, *bits, *sorted(choice.prompt_ids), *counts)


def _candidates(scores: int, vocabulary: Vocabulary) -> Iterator[int]:
    """Distinct ids, most likely first, the first few by hash and the rest in order; ends of sequence left out."""
    seen = set(vocabulary.eos_ids)
    for rank in range(_NUM_CANDIDATES):
        token = mix(scores, rank) % vocabulary.size
        if token not in seen:
            seen.add(token)
            yield token
    yield from (token for token in range(vocabulary.size) if token not in seen)


def next_token(sequence_hash: int, choice: Choice, vocabulary: Vocabulary) -> int | None:
    """The token that follows a sequence, or None when bias and mask allow none."""
    scores = _scores(sequence_hash, choice)
    drawn = scores
    if choice.temperature > 0 and choice.top_k != 1:
        fields = (choice.temperature, choice.top_p, choice.min_p)
        drawn = mix(scores, choice.seed, choice.position, choice.top_k, *map(_float_bits, fields))

    def possible(token: int) -> bool:
        unmasked = choice.allowed is None or choice.allowed(token)
        return unmasked and choice.bias.get(token, 0.0) > -_FORCE_BIAS

    forced = [token for token, value in choice.bias.items() if value >= _FORCE_BIAS and possible(token)]
    if forced:
        return max(forced, key=lambda token: (choice.bias[token], -token))
    if choice.given is not None:
        return _given_token(choice, choice.given, drawn if drawn != scores else 0)
    ends = mix(drawn, _EOS_KEY) < vocabulary.eos_threshold
    last = tuple(token for token in vocabulary.eos_ids if possible(token))
    if ends and last:
        return last[0]
    return next((token for token in _candidates(drawn, vocabulary) if possible(token)), last[0] if last else None)


def _given_token(choice: Choice, given: npt.NDArray[np.float32], drawn: int) -> int | None:
    """The likeliest token by given logits, or, where the choice is random, one of those that are nearly as likely."""
    scores = given.astype(np.float64)
    for token, value in choice.bias.items():
        scores[token] += value
    order = np.argsort(-scores, kind="stable").tolist()
    possible = [
        token for token in order if scores[token] > -np.inf and (choice.allowed is None or choice.allowed(token))
    ]
    near = [token for token in possible if scores[token] > scores[possible[0]] - _NEAR]
    return near[drawn % len(near)] if near else None


def made_up_logits(sequence_hash: int, vocabulary: Vocabulary) -> npt.NDArray[np.float32]:
    """Logits ``[vocab]`` after a sequence; ``token_logprobs`` gives the same numbers."""
    ids = np.arange(vocabulary.size, dtype=np.uint64)
    unlikely = mix_arrays(np.full_like(ids, sequence_hash), ids) % np.uint64(4096)
    logits = (-40.0 - unlikely.astype(np.float64) / 256).astype(np.float32)
    for rank, candidate in zip(range(_NUM_CANDIDATES), _candidates(sequence_hash, vocabulary), strict=False):
        logits[candidate] = -0.5 * (rank + 1)
    return logits


def next_tokens(
    hashes: npt.NDArray[np.uint64], sampling: SamplingBatch, vocabulary: Vocabulary
) -> npt.NDArray[np.int64]:
    """``next_token`` of many rows at once, ``int64 [n]``; -1 for a row that only ``next_token`` can decide.

    Those are rows with penalties, bias, mask or given logits, and the few whose first candidate is an end of sequence.
    """
    fields = (sampling.temperature, sampling.top_p, sampling.min_p)
    columns = [hashes, sampling.seeds, sampling.positions.astype(np.uint64), sampling.top_k.astype(np.uint64)]
    columns += [np.ascontiguousarray(values).view(np.uint32).astype(np.uint64) for values in fields]
    random = (sampling.temperature > 0) & (sampling.top_k != 1)
    drawn = np.where(random, mix_arrays(*columns), hashes)
    zeros = np.zeros_like(drawn)
    tokens = (mix_arrays(drawn, zeros) % np.uint64(vocabulary.size)).astype(np.int64)
    hard = (sampling.frequency_penalty != 0) | (sampling.presence_penalty != 0) | (sampling.repetition_penalty != 1)
    hard |= sampling.has_mask | np.isin(tokens, vocabulary.eos_ids)
    hard[sampling.bias_index] = True
    if sampling.given_logits is not None:
        hard[sampling.given_logits[0]] = True
    if vocabulary.eos_threshold:
        last = np.uint64(min(vocabulary.eos_threshold - 1, _BITS))
        hard |= mix_arrays(drawn, zeros + np.uint64(_EOS_KEY)) <= last
    tokens[hard] = -1
    return tokens


def token_logprobs(
    sequence_hash: int, token: int, top: int, token_ids: Sequence[int], vocabulary: Vocabulary
) -> TokenLogprobs:
    """Made-up logprobs after a sequence: half a nat between ranks, the same for every way of choosing."""

    def logprob_of(wanted: int) -> float:
        for rank, candidate in zip(range(_NUM_CANDIDATES), _candidates(sequence_hash, vocabulary), strict=False):
            if candidate == wanted:
                return -0.5 * (rank + 1)
        return -40.0 - mix(sequence_hash, wanted) % 4096 / 256

    ranked = zip(range(top), _candidates(sequence_hash, vocabulary), strict=False)
    return TokenLogprobs(
        logprob=logprob_of(token),
        top=tuple((candidate, logprob_of(candidate)) for _, candidate in ranked),
        chosen=tuple((wanted, logprob_of(wanted)) for wanted in token_ids),
    )


def expected_tokens(
    prompt_ids: Sequence[int], params: SamplingParams, vocabulary: Vocabulary, count: int | None = None
) -> list[int]:
    """Tokens that a request gets when it runs alone, without slots, tables, chunks or cache.

    Stops after ``count`` (``max_new_tokens`` by default) or, unless ``ignore_eos``, with an end of sequence
    once there are ``min_new_tokens``; stop strings are not looked at.
    """
    hasher = SequenceHasher()
    output: list[int] = []
    limit = params.max_new_tokens if count is None else count
    while len(output) < limit:
        sequence = [*prompt_ids, *output]
        held_back = len(output) < params.min_new_tokens
        bias = dict(params.logit_bias)
        if held_back:
            bias |= dict.fromkeys((*vocabulary.eos_ids, *params.stop_token_ids), float("-inf"))
        choice = Choice(
            temperature=params.temperature,
            top_k=params.top_k if params.top_k > 0 else vocabulary.size,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=params.seed or 0,
            position=len(sequence),
            penalties=(params.frequency_penalty, params.presence_penalty, params.repetition_penalty),
            prompt_ids=frozenset(prompt_ids),
            output_counts=Counter(output),
            bias=bias,
        )
        token = next_token(hasher(sequence), choice, vocabulary)
        if token is None:
            break
        output.append(token)
        stops = token in params.stop_token_ids or (token in vocabulary.eos_ids and not params.ignore_eos)
        if stops and not held_back:
            break
    return output
