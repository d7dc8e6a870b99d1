"""A golden record: what a model said of some sequences, where that was, and how it is kept in one file.

It knows no engine. What a record means to another is ``comparison``'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cardan.accuracy.answers import read_answers
from cardan.accuracy.cases import Case
from cardan.accuracy.container import Arrays, read_container, write_container
from cardan.accuracy.fingerprints import Fingerprint
from cardan.accuracy.scores import Greedy, Scores
from cardan.errors import CardanError, GoldenFileError
from cardan.types import Float32Array, Int32Array

NOISE_NUMBERS = ("mean", "p99", "max", "moves", "flip_margin")
"""What is kept of each kind of variation."""
_SMALL_IDS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerPrints:
    """Results of some operations at some positions, as norms and random projections.

    Attributes:
        taps: names of the operations, in order of their use.
        cases: int32 ``[p]``, which case each position belongs to.
        positions: int32 ``[p]``, which position of it.
        norms: float32 ``[p, taps]``.
        projections: float32 ``[p, taps, r]``.
        seed: of the projections.
    """

    taps: tuple[str, ...]
    cases: Int32Array
    positions: Int32Array
    norms: Float32Array
    projections: Float32Array
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recorded:
    """One case and what came of it.

    Attributes:
        case: the sequence.
        text: of the whole sequence, or empty where there is no tokenizer.
        scores: of its positions.
        greedy: what the model itself went on with after the prompt, or None where that was not asked.
        greedy_text: the same as text.
    """

    case: Case
    text: str
    scores: Scores
    greedy: Greedy | None = None
    greedy_text: str = ""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Golden:
    """A whole record.

    Attributes:
        fingerprint: of everything that made it.
        cases: in order.
        layers: fingerprints of layers, or None where the maker shows none.
        whole: whole results by ``case/tap``, float32 ``[positions, width]``, where asked for.
        noise: by kind of variation, what it alone moves (see ``noise``); empty where it was not measured.
        semantics: what the maker says of request parameters and what was measured of them; empty where not.
        notes: what a reader should know.
    """

    fingerprint: Fingerprint
    cases: tuple[Recorded, ...]
    layers: LayerPrints | None = None
    whole: Mapping[str, Float32Array] = field(default_factory=dict)
    noise: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    semantics: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def top(self) -> int:
        """How many of the likeliest tokens each position has."""
        return int(self.cases[0].scores.top_ids.shape[1])

    @property
    def num_positions(self) -> int:
        """Positions of all cases."""
        return sum(recorded.scores.num_positions for recorded in self.cases)

    def write(self, path: Path) -> None:
        """Keep it in a file.

        Raises:
            GoldenFileError: the file cannot be written.
        """
        header: dict[str, Any] = {
            "fingerprint": self.fingerprint.to_json(),
            "cases": [_case_header(recorded) for recorded in self.cases],
            "noise": self.noise,
            "semantics": self.semantics,
            "notes": list(self.notes),
        }
        arrays = _arrays(self.cases, self.fingerprint.vocab_size)
        if self.layers is not None:
            header["layers"] = {"taps": list(self.layers.taps), "seed": self.layers.seed}
            arrays |= {f"layers.{name}": getattr(self.layers, name) for name in _LAYER_ARRAYS}
        arrays |= {f"whole.{name}": values for name, values in self.whole.items()}
        write_container(path, header, arrays)


_LAYER_ARRAYS = ("cases", "positions", "norms", "projections")


def read_golden(path: Path) -> Golden:
    """Read a record.

    Raises:
        GoldenFileError: the file is missing, damaged, changed, of a later version, or holds what is no number.
    """
    container = read_container(path)
    header, arrays = container.header, container.arrays
    try:
        cases = _read_cases(header["cases"], arrays)
        if not cases:
            raise ValueError("no prompts")
        for recorded in cases:
            recorded.scores.check(recorded.case.name)
        layers = _read_layers(header.get("layers"), arrays)
        return Golden(
            fingerprint=Fingerprint.from_json(header["fingerprint"]),
            cases=cases,
            layers=layers,
            whole={name[6:]: values for name, values in arrays.items() if name.startswith("whole.")},
            noise=_read_noise(header["noise"]),
            semantics=_read_semantics(header["semantics"]),
            notes=tuple(header["notes"]),
        )
    except CardanError as error:
        raise GoldenFileError(f"{path} cannot be compared. {error}") from error
    except (KeyError, TypeError, ValueError, AssertionError, AttributeError, IndexError) as error:
        raise GoldenFileError(
            f"{path} lacks what a golden file of version {container.version} has ({error!r}). Record it anew."
        ) from error


def _case_header(recorded: Recorded) -> dict[str, Any]:
    fields = asdict(recorded.case)
    fields["num_ids"] = len(fields.pop("ids"))
    greedy = None if recorded.greedy is None else len(recorded.greedy.ids)
    return {
        **fields,
        "positions": recorded.scores.num_positions,
        "greedy": greedy,
        "text": recorded.text,
        "greedy_text": recorded.greedy_text,
    }


def _arrays(cases: Sequence[Recorded], vocab_size: int) -> dict[str, Any]:
    free = [recorded.greedy for recorded in cases if recorded.greedy is not None]
    ids = _type_of_ids([recorded.scores.top_ids for recorded in cases] + [greedy.ids for greedy in free], vocab_size)
    found = {
        "ids": np.concatenate([np.asarray(recorded.case.ids, ids) for recorded in cases]),
        "logprobs": np.concatenate([recorded.scores.logprobs for recorded in cases]),
        "top_ids": np.concatenate([recorded.scores.top_ids.astype(ids) for recorded in cases]),
        "top_logprobs": np.concatenate([recorded.scores.top_logprobs for recorded in cases]),
        "rest": np.concatenate([recorded.scores.rest for recorded in cases]),
    }
    if free:
        found["greedy_ids"] = np.concatenate([greedy.ids.astype(ids) for greedy in free])
        found["greedy_logprobs"] = np.concatenate([greedy.logprobs for greedy in free])
        found["greedy_margins"] = np.concatenate([greedy.margins for greedy in free])
    return found


def _type_of_ids(arrays: Sequence[Int32Array], vocab_size: int) -> type[np.uint16] | type[np.int32]:
    """The smallest type that holds them; ids that a server did not name are below 0."""
    small = 0 < vocab_size <= _SMALL_IDS and all(array.min(initial=0) >= 0 for array in arrays)
    return np.uint16 if small else np.int32


def _read_cases(entries: Sequence[Mapping[str, Any]], arrays: Arrays) -> tuple[Recorded, ...]:
    found = []
    at = {"ids": 0, "positions": 0, "greedy": 0}
    for entry in entries:
        ids = _take(arrays["ids"], at, "ids", entry["num_ids"])
        span = slice(at["positions"], at["positions"] + entry["positions"])
        at["positions"] = span.stop
        scores = Scores(
            logprobs=arrays["logprobs"][span],
            top_ids=arrays["top_ids"][span].astype(np.int32),
            top_logprobs=arrays["top_logprobs"][span],
            rest=arrays["rest"][span],
        )
        fields = {name: entry[name] for name in ("name", "num_prompt", "score_from", "wave", "greedy_tokens")}
        wrong = [name for name, value in fields.items() if not isinstance(value, str if name == "name" else int)]
        if wrong:
            raise TypeError(f"{wrong[0]} of a prompt is {fields[wrong[0]]!r}")
        case = Case(ids=tuple(int(token) for token in ids), **fields)
        if case.num_positions != scores.num_positions:
            raise ValueError(f"{case.name} has {scores.num_positions} positions of {case.num_positions}")
        greedy = None
        if entry["greedy"] is not None:
            here = slice(at["greedy"], at["greedy"] + entry["greedy"])
            at["greedy"] = here.stop
            greedy = Greedy(
                ids=arrays["greedy_ids"][here].astype(np.int32),
                logprobs=arrays["greedy_logprobs"][here],
                margins=arrays["greedy_margins"][here],
            )
            if {len(greedy.ids), len(greedy.logprobs), len(greedy.margins)} != {entry["greedy"]}:
                raise ValueError(f"{case.name} has {len(greedy.ids)} tokens of free text of {entry['greedy']}")
        found.append(
            Recorded(case=case, text=entry["text"], scores=scores, greedy=greedy, greedy_text=entry["greedy_text"])
        )
    return tuple(found)


def _take(array: Any, at: dict[str, int], name: str, count: int) -> Any:
    start = at[name]
    at[name] = start + count
    return array[start : start + count]


def _read_noise(kept: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    found = {way: {name: float(number) for name, number in spread.items()} for way, spread in kept.items()}
    for way, spread in found.items():
        if any(np.isnan(spread[name]) for name in NOISE_NUMBERS):
            raise ValueError(f"the noise of {way!r} is no number")
    return found


def _read_semantics(kept: Mapping[str, Any]) -> Mapping[str, Any]:
    read_answers(kept)
    return kept


def _read_layers(entry: Mapping[str, Any] | None, arrays: Arrays) -> LayerPrints | None:
    if entry is None:
        return None
    values = {name: arrays[f"layers.{name}"] for name in _LAYER_ARRAYS}
    return LayerPrints(taps=tuple(entry["taps"]), seed=int(entry["seed"]), **values)
