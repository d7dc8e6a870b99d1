"""Makes a golden record by running sequences through an engine as they are served.

It knows no file; ``golden`` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cardan.accuracy.cases import LEAST_POSITIONS, Case, Text, bundled_texts, check_cases, limited
from cardan.accuracy.fingerprints import fingerprint
from cardan.accuracy.golden import Golden, LayerPrints, Recorded
from cardan.accuracy.layers import layer_results, prints_of
from cardan.accuracy.noise import POSITIONS, noise_floor
from cardan.accuracy.semantics import measure
from cardan.accuracy.session import Progress, Run, Session
from cardan.accuracy.watching import watch
from cardan.config import EngineConfig
from cardan.engine.model_files import load_model_tokenizer
from cardan.errors import ConfigError, ModelError
from cardan.platform import Platform
from cardan.text.tokenizer import Tokenizer
from cardan.types import Float32Array

TOP = 64
MOST_TOP = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a record is to hold.

    Attributes:
        texts: what is measured; the bundled ones by default.
        cases: sequences of ids instead.
        top: likeliest tokens of each position.
        positions: most scored positions of all sequences together, or None for all.
        layers: whether fingerprints of layers are made, where the device shows them.
        whole: taps whose whole results are kept.
        noise: whether the noise floor is measured.
        noise_positions: most scored positions that it is measured on.
        greedy: whether free texts are generated.
        semantics: whether request parameters are tried.
    """

    texts: tuple[Text, ...] = field(default_factory=bundled_texts)
    cases: tuple[Case, ...] | None = None
    top: int = TOP
    positions: int | None = None
    layers: bool = True
    whole: tuple[str, ...] = ()
    noise: bool = True
    noise_positions: int = POSITIONS
    greedy: bool = True
    semantics: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.top <= MOST_TOP:
            raise ConfigError(f"--top must be between 1 and {MOST_TOP}, got {self.top}.")
        if self.noise_positions < LEAST_POSITIONS:
            raise ConfigError(
                f"--noise-positions must be at least {LEAST_POSITIONS}, got {self.noise_positions}. "
                "Pass more, or --no-noise."
            )
        if self.positions is not None and self.positions < LEAST_POSITIONS:
            raise ConfigError(
                f"--positions must be at least {LEAST_POSITIONS}, got {self.positions}. Pass more, or none for all."
            )


def make_cases(wanted: Wanted, tokenizer: Tokenizer | None) -> tuple[Case, ...]:
    """The sequences that are wanted, as ids.

    Raises:
        ConfigError: there are texts and no tokenizer.
    """
    if wanted.cases is not None:
        return limited(wanted.cases, wanted.positions)
    if tokenizer is None:
        raise ConfigError("The model has no tokenizer, so texts cannot be measured. Pass --tokenizer.")
    return limited((text.case(tokenizer.encode) for text in wanted.texts), wanted.positions)


def record(
    config: EngineConfig,
    wanted: Wanted | None = None,
    progress: Progress | None = None,
    platform: Platform | None = None,
) -> Golden:
    """Start an engine, run everything that is wanted, and end it.

    Sequences of ids come with no text; where the model has a tokenizer it gives them theirs.

    Args:
        config: what runs.
        wanted: what is measured.
        progress: told how far it is.
        platform: taken instead of the one that the config names.

    Raises:
        CardanError: the engine does not start, or a request fails.
    """
    wanted = wanted or Wanted()
    tokenizer = tokenizer_for(config, required=wanted.cases is None)
    with Session(config, progress, platform) as session:
        cases = make_cases(wanted, tokenizer)
        return record_session(session, cases, wanted, tokenizer, progress)


def tokenizer_for(config: EngineConfig, *, required: bool) -> Tokenizer | None:
    """The model's tokenizer, or None where it has none and none is required.

    Raises:
        ModelError: there is no such model, or no tokenizer where one is required.
    """
    try:
        return load_model_tokenizer(config.model, renders_chat=False)
    except ModelError:
        if required:
            raise
        return None


def record_session(
    session: Session,
    cases: Sequence[Case],
    wanted: Wanted,
    tokenizer: Tokenizer | None = None,
    progress: Progress | None = None,
) -> Golden:
    """A record of a session that runs already."""
    plan = session.plan
    cases = check_cases(cases, plan.model.vocab_size, min(plan.context_length, int(plan.value("max_total_tokens")) - 1))
    _check_whole(session, cases, wanted.whole)
    top = min(wanted.top, plan.model.vocab_size)
    checkpoint = session.prepared.opened.checkpoint
    made_by = fingerprint(plan, session.capabilities, checkpoint, tokenizer, progress=progress)
    with session.run() as run:
        scores = run.score(cases, top, progress)
        greedy = run.generate(cases) if wanted.greedy else [None] * len(cases)
        notes = (_what_ran(run, cases), *plan.notes)
    layers, whole = _layers(session, cases, wanted)
    noise = noise_floor(session, cases, top, progress, wanted.noise_positions) if wanted.noise else {}
    recorded = tuple(
        Recorded(
            case=case,
            text=text_of(tokenizer, case.ids),
            scores=score,
            greedy=free,
            greedy_text=text_of(tokenizer, () if free is None else free.ids.tolist()),
        )
        for case, score, free in zip(cases, scores, greedy, strict=True)
    )
    return Golden(
        fingerprint=made_by,
        cases=recorded,
        layers=layers,
        whole=whole,
        noise=noise,
        semantics=measure(session, progress) if wanted.semantics else {},
        notes=notes,
    )


def text_of(tokenizer: Tokenizer | None, ids: Sequence[int]) -> str:
    """What ids stand for; ids that a padded vocabulary has and the tokenizer lacks are left out."""
    if tokenizer is None:
        return ""
    return tokenizer.decode([token for token in ids if token < tokenizer.vocab_size], skip_special_tokens=False)


def _what_ran(run: Run, cases: Sequence[Case]) -> str:
    totals = run.totals
    prefill = sum(case.num_prefill for case in cases)
    decode = sum(case.num_positions for case in cases) - prefill
    replays = totals.get("graph_replays", 0)
    return (
        f"{prefill} positions were scored in prefill and {decode} in decode steps; {totals.get('prefill_batches', 0)} "
        f"prefill passes, {run.cached_tokens} tokens from cached prefixes, {replays} steps replayed from graphs"
    )


def _check_whole(session: Session, cases: Sequence[Case], whole: Sequence[str]) -> None:
    """See by a few tokens that there are the results to keep, before all are scored."""
    if not whole:
        return
    if watch(session.prepared.loaded, lambda call: None) is None:
        raise ConfigError(
            f"--whole-layer keeps results of operations, and {session.plan.device.name} shows none. Drop it."
        )
    shortest = min(cases, key=lambda case: len(case.ids))
    taps = tuple(layer_results(session, [shortest])[0])
    unknown = [tap for tap in whole if tap not in taps]
    if unknown:
        some = ", ".join(taps) if len(taps) <= 8 else f"{', '.join(taps[:2])} … {', '.join(taps[-3:])}"
        raise ConfigError(f"--whole-layer names {unknown[0]!r}, expected some of {some}.")


def _layers(
    session: Session, cases: Sequence[Case], wanted: Wanted
) -> tuple[LayerPrints | None, Mapping[str, Float32Array]]:
    if not (wanted.layers or wanted.whole) or watch(session.prepared.loaded, lambda call: None) is None:
        return None, {}
    results = layer_results(session, cases)
    whole = {
        f"{case.name}/{tap}": result[tap] for case, result in zip(cases, results, strict=True) for tap in wanted.whole
    }
    return prints_of(results, sum(case.num_positions for case in cases)), whole
