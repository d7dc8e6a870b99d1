"""Finds what carries a difference: one feature after the other is turned off or computed by its reference.

It knows no platform: features are those of the plan, and operations those that every model calls. A feature carries
the difference where this is within the noise floor without it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cardan.accuracy.attribution_report import Attribution, Deviation, Tap, Trial, layer_of
from cardan.accuracy.cases import Case, limited
from cardan.accuracy.comparison import Comparison
from cardan.accuracy.golden import Golden
from cardan.accuracy.layers import ONE_BY_ONE, layer_results, moved
from cardan.accuracy.noise import POSITIONS, Spread, spread
from cardan.accuracy.operations import Checker, Replacer
from cardan.accuracy.references import GROUPS, Allowance, References
from cardan.accuracy.rounding import Pusher
from cardan.accuracy.scores import Scores
from cardan.accuracy.session import Progress, Session, Way
from cardan.accuracy.switches import ALL_OFF, switches
from cardan.accuracy.verdict import Verdict, is_noise
from cardan.accuracy.watching import Listener, watch
from cardan.config import EngineConfig
from cardan.errors import CardanError
from cardan.platform import Platform
from cardan.runner import NeutralDevice, NeutralRunner

LAYER_FACTOR = 6.0
"""How many times what rounding moves it a result may be from the record's: three times on each side."""
MOST_DEVIATIONS = 32
"""Calls that are kept of those that left the band."""
MOSTLY = 0.1
"""What is left of a KL where a feature carries most of it."""
TOGETHER = "all of these"
EVERYTHING = "all operations"


def attribute(
    truth: Golden,
    compared: Comparison,
    config: EngineConfig,
    progress: Progress | None = None,
    platform: Platform | None = None,
) -> Attribution:
    """What carries the difference of an engine from a record.

    Args:
        truth: the record.
        compared: the engine with it.
        config: of the engine.
        progress: told how far it is.
        platform: taken instead of the one that the config names.

    Raises:
        CardanError: the engine does not start, or a request fails.
    """
    unheeded = [meaning.name for meaning in compared.semantics if meaning.theirs is not None and meaning.theirs.fails]
    if compared.judgement.verdict is Verdict.SAME:
        return Attribution(
            feature="",
            layer=None,
            statements=("There is no difference beyond noise, so nothing was looked for.",),
            kl_mean=compared.all_positions.mean.value,
            positions=compared.all_positions.positions,
        )
    with Session(config, progress, platform) as session:
        return _Search(session, truth, compared, progress).attribution(unheeded)


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has come to.

    Attributes:
        base: spread as configured.
        trials: one by one.
        deviations: calls that left the band.
        operations: calls that were looked at.
        tap: first result beyond noise.
    """

    base: Spread
    trials: tuple[Trial, ...]
    deviations: tuple[Deviation, ...]
    operations: int
    tap: Tap | None


class _Search:
    """One search over one session."""

    def __init__(self, session: Session, truth: Golden, compared: Comparison, progress: Progress | None) -> None:
        self._session = session
        self._truth = truth
        self._compared = compared
        self._floor = compared.judgement.band
        self._progress = progress
        self._cases: tuple[Case, ...] = ()
        self._wanted: tuple[Scores, ...] = ()
        self._done = 0

    def attribution(self, unheeded: Sequence[str]) -> Attribution:
        """Everything that can be said."""
        base = self._base()
        if is_noise(base, self._floor):
            return self._without_numbers(base, unheeded)
        found = switches(self._session, self._cases)
        trials = [self._try(switch.feature, switch.how, switch.make) for switch in found]
        everything_off = self._try(TOGETHER, ALL_OFF.name, lambda: ALL_OFF)
        trials.append(everything_off)
        deviations: tuple[Deviation, ...] = ()
        operations, tap = 0, None
        if watch(self._session.prepared.loaded, lambda call: None) is not None:
            try:
                checker = self._checked()
                deviations, operations = tuple(checker.deviations), checker.calls
                tap = self._first_tap()
            except Exception as error:  # noqa: BLE001 - what was found so far still stands
                trials.append(_untried("operations", "each is held to its float64 reference", error))
            trials += self._operations(everything_off, deviations)
        return conclude(Found(base, tuple(trials), deviations, operations, tap), self._session.plan.dtype, unheeded)

    def _base(self) -> Spread:
        """The spread as configured, on few positions if these show it, else on all."""
        all_cases = tuple(recorded.case for recorded in self._truth.cases)
        found: Spread = {}
        for cases in dict.fromkeys((limited(all_cases, POSITIONS), all_cases)):
            self._cases = cases
            self._wanted = tuple(
                recorded.scores.first(case.num_positions)
                for recorded, case in zip(self._truth.cases, cases, strict=True)
            )
            found = self._spread(Way(name="as configured"))
            if not is_noise(found, self._floor):
                break
        return found

    def _spread(self, way: Way, listener: Listener | None = None) -> Spread:
        self._done += 1
        if self._progress is not None:
            self._progress("attribution", self._done, 0)
        top = self._truth.top
        with self._session.run(way, listener) as run:
            scores = run.score(self._cases, top)
        pairs = zip(self._wanted, scores, strict=True)
        cut = [(p.cut(q.top_ids.shape[1]), q) for p, q in pairs]
        return spread([p for p, _ in cut], [q for _, q in cut])

    def _try(self, feature: str, how: str, make: Callable[[], Way], listener: Listener | None = None) -> Trial:
        try:
            found = self._spread(make(), listener)
        except Exception as error:  # noqa: BLE001 - devices raise their own where memory runs out
            return _untried(feature, how, error)
        return Trial(
            feature=feature,
            how=how,
            kl_mean=found["mean"],
            kl_max=found["max"],
            gone=is_noise(found, self._floor),
        )

    def _references(self) -> References:
        opened, plan = self._session.prepared.opened, self._session.plan
        return References(opened.model, opened.checkpoint, plan.context_length)

    def _checked(self) -> Checker:
        """Every call of a run, held to its reference."""
        session, references = self._session, self._references()
        device = session.prepared.device
        assert isinstance(device, NeutralDevice), "only its models can be watched"
        checker = Checker(references, Allowance(references, session.plan, session.capabilities, device.device))
        with session.run(ONE_BY_ONE, checker) as run:
            for case in self._cases:
                run.score([case.without_sharing()], 1)
        return checker

    def _operations(self, off: Trial, deviations: Sequence[Deviation]) -> Iterator[Trial]:
        """Operations unfused, then groups by their references: those that left the band one by one, and all."""
        if off.gone or off.note:
            return
        runner = self._session.prepared.runner
        if isinstance(runner, NeutralRunner) and runner.rotates_in_attention:
            yield self._try("fused kernels", "rotation and attention run apart", lambda: ALL_OFF, lambda call: None)
        groups = tuple(dict.fromkeys(deviation.group for deviation in deviations))
        dtype = self._session.plan.dtype
        for group in groups:
            replacer = Replacer(self._references(), (group,), dtype)
            yield self._try(group, "by their float64 references", lambda: ALL_OFF, replacer)
        everything = Replacer(self._references(), tuple(GROUPS), dtype)
        yield self._try(EVERYTHING, "by their float64 references", lambda: ALL_OFF, everything)

    def _first_tap(self) -> Tap | None:
        """The first result that is farther from the record's than rounding can move it."""
        errors = self._compared.layer_errors
        if not errors:
            return None
        clean = layer_results(self._session, self._cases)
        floor = moved(clean, layer_results(self._session, self._cases, Pusher(self._session.plan.dtype, 1)))
        for name, error in errors.items():
            if name in floor and error > LAYER_FACTOR * floor[name]:
                return Tap(name=name, layer=layer_of(name), error=error, floor=floor[name])
        return None

    def _without_numbers(self, base: Spread, unheeded: Sequence[str]) -> Attribution:
        """The numbers are within noise, so what differs is of another kind."""
        if unheeded:
            names = ", ".join(unheeded)
            said = f"Logits are within noise; the difference is carried by {names}, which draws do not follow."
        else:
            said = "Numbers are within noise here; the verdict has other reasons, which no feature of the plan carries."
        return Attribution(
            feature=", ".join(unheeded),
            layer=None,
            statements=(said,),
            kl_mean=base["mean"],
            positions=int(base["positions"]),
        )


def _untried(feature: str, how: str, error: Exception) -> Trial:
    """A trial that failed, for want of memory say, in which case the others still stand."""
    name = "" if isinstance(error, CardanError) else f"{type(error).__name__}: "
    first, *_ = str(error).splitlines() or [""]
    return Trial(feature=feature, how=how, note=f"could not be tried: {name}{first}")


def conclude(found: Found, dtype: str, unheeded: Sequence[str] = ()) -> Attribution:
    """Which feature carries a difference, and where it begins."""
    carriers = [trial for trial in found.trials if trial.gone and trial.feature not in (TOGETHER, EVERYTHING)]
    statements = []
    feature = ""
    if carriers:
        first, *others = carriers
        feature = first.feature
        statements.append(
            f"The difference is carried by {feature}: where {_words(first)}, mean KL falls from "
            f"{found.base['mean']:.2g} to {first.kl_mean:.2g}, which is within noise."
        )
        if others:
            statements.append("It also goes where " + "; where ".join(_words(trial) for trial in others) + ".")
    else:
        feature, said = _mostly(found)
        statements.append(said)
    statements += [f"Draws do not follow {name}, whatever the logits." for name in unheeded]
    origin = _origin(found, {trial.feature for trial in carriers})
    statements += _where(found, origin, dtype)
    layer = origin.layer if origin is not None else (None if found.tap is None else found.tap.layer)
    return Attribution(
        feature=feature,
        layer=layer,
        statements=tuple(statements),
        kl_mean=found.base["mean"],
        positions=int(found.base["positions"]),
        trials=found.trials,
        operations=found.operations,
        deviations=found.deviations[:MOST_DEVIATIONS],
        tap=found.tap,
    )


def _words(trial: Trial) -> str:
    return f"{trial.feature} come {trial.how}" if trial.feature in GROUPS else trial.how


def _mostly(found: Found) -> tuple[str, str]:
    """What carries most of a difference that no feature carries alone."""
    alone = [trial for trial in found.trials if not trial.note and trial.feature not in (TOGETHER, EVERYTHING)]
    best = min(alone, key=lambda trial: trial.kl_mean, default=None)
    if best is not None and best.kl_mean <= MOSTLY * found.base["mean"]:
        return best.feature, (
            f"Most of the difference is carried by {best.feature}: where {_words(best)}, mean KL falls from "
            f"{found.base['mean']:.2g} to {best.kl_mean:.2g}, which is more than noise."
        )
    together = {trial.feature: trial for trial in found.trials}
    if together.get(TOGETHER, Trial(feature="", how="")).gone:
        return "", "No feature carries the difference alone, but it is gone where all are off together."
    last = together.get(EVERYTHING)
    if last is not None and last.gone:
        return "", "No group of operations carries the difference alone, but it is gone where all are references."
    if last is not None and not last.note:
        return "", (
            f"Nothing that runs here carries the difference: by float64 references of all operations mean KL is "
            f"{last.kl_mean:.2g}. The model's weights, config or code differ from the record's, or the record is wrong."
        )
    return "", "No feature that can be turned off carries the difference."


def _origin(found: Found, carriers: set[str]) -> Deviation | None:
    """The first call that left the band, of those groups that carry the difference where some do."""
    carrying = [deviation for deviation in found.deviations if deviation.group in carriers]
    return next(iter(carrying or found.deviations), None)


def _where(found: Found, origin: Deviation | None, dtype: str) -> Iterator[str]:
    if origin is not None:
        left = len(found.deviations)
        yield (
            f"Of {found.operations} operations {left} left the band of {dtype}. Where it begins: {origin.describe()}."
        )
    elif found.operations:
        yield f"Each of {found.operations} operations is as near to its float64 reference as {dtype} rounds."
    if found.tap is not None:
        tap = found.tap
        yield (
            f"Against the record, {tap.name} is the first result beyond noise: relative error {tap.error:.2g}, of "
            f"which rounding moves {tap.floor:.2g}."
        )
