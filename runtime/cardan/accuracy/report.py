"""A comparison as one HTML page that needs nothing else: no script, no font, no picture from elsewhere.

It measures nothing and judges nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from cardan import __version__
from cardan.accuracy.answers import Answer
from cardan.accuracy.attribution_report import Attribution
from cardan.accuracy.comparison import CaseResult, Comparison, Divergence, Meaning
from cardan.accuracy.plots import Axis, bars, dots, log_axis
from cardan.accuracy.statistics import Estimate
from cardan.accuracy.verdict import Verdict

LEAST_KL = 1e-13
"""What is drawn at the bottom of plots."""
_CLASSES = {Verdict.SAME: "same", Verdict.DRIFT: "drift", Verdict.DIFFERENT: "different"}
_STYLE = """
:root{color-scheme:light dark;--ink:#1c2024;--dim:#667;--paper:#fff;--line:#d9dde3;--mark:#2864c8;--warn:#b4690e}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8ea;--dim:#9aa3ad;--paper:#15181c;--line:#333a42;--mark:#7fb0ff;
--warn:#f0b35a}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);margin:2rem auto;max-width:60rem;
padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.25rem .6rem .25rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}.verdict{font-size:1.3rem;font-weight:600}
.same{color:#1a8a4a}.drift{color:var(--warn)}.different{color:#d03434}.dim{color:var(--dim)}
svg{width:100%;height:auto}svg text{font-size:11px;fill:var(--dim)}svg circle,svg rect{fill:var(--mark)}
.grid{stroke:var(--line)}.level{stroke:var(--warn);stroke-dasharray:5 4}pre{white-space:pre-wrap;margin:0}
@media(max-width:40rem){table{display:block;overflow-x:auto}}
"""


def render(compared: Comparison) -> str:
    """The page."""
    judgement = compared.judgement
    word = judgement.verdict
    title = f"{compared.ours} against {compared.theirs}"
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        "<meta name='viewport' content='width=device-width'>",
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{html.escape(title)}</h1>",
        _differences(compared),
        f"<p class='verdict {_CLASSES[word]}'>{word}</p><ul>",
        *(f"<li>{html.escape(reason)}</li>" for reason in judgement.reasons),
        f"</ul><p class='dim'>Noise floor {html.escape(judgement.band_from)}: mean KL {judgement.band['mean']:.2g}, "
        f"p99 {judgement.band['p99']:.2g}, largest {judgement.band['max']:.2g}; a logprob moves by "
        f"{judgement.band['moves']:.2g} at most.</p>",
        _attribution(compared.attribution),
        _numbers(compared),
        _plots(compared),
        _semantics(compared.semantics),
        _cases(compared.cases),
        f"<p class='dim'>Made by cardan {__version__}.</p></body></html>\n",
    ]
    return "".join(parts)


def _differences(compared: Comparison) -> str:
    if not compared.differences:
        return "<p>The fingerprints are equal.</p>"
    rows = [
        (item.what, item.ours, item.theirs, "moves numbers" if item.weighs else "") for item in compared.differences
    ]
    return "<h2>Fingerprints</h2>" + _table(("differs", "first", "second", ""), rows)


def _numbers(compared: Comparison) -> str:
    stages = {"all positions": compared.all_positions, **compared.stages}
    rows = [(name, *_divergence(value)) for name, value in stages.items()]
    headers = ("", "positions", "mean", "median", "p99", "largest")
    perplexities = compared.perplexities
    return (
        f"<h2>Numbers</h2><p>KL in nats, of the top {compared.top}: a lower bound of that over the whole vocabulary. "
        "Bounds are of 95 percent.</p>"
        + _table(headers, rows, numbers=range(1, 6))
        + f"<p>Same likeliest token: {_estimate(compared.agreement, '.2%')}. Perplexity {perplexities.ours:.4f} and "
        f"{perplexities.theirs:.4f}, difference {_estimate(perplexities.difference, '+.2g')}.</p>"
    )


def _attribution(found: Attribution | None) -> str:
    if found is None:
        return ""
    statements = "".join(f"<li>{html.escape(statement)}</li>" for statement in found.statements)
    rows = [("as configured", "", f"{found.kl_mean:.2g}", "", "")]
    for trial in found.trials:
        shown = ("", "", trial.note)
        if not trial.note:
            shown = (f"{trial.kl_mean:.2g}", f"{trial.kl_max:.2g}", "within noise" if trial.gone else "")
        rows.append((trial.feature, trial.how, *shown))
    parts = ["<h2>What carries the difference</h2><ul>", statements, "</ul>"]
    if found.trials:
        parts.append(_table(("without", "instead", "mean KL left", "largest left", ""), rows, numbers=(2, 3)))
    if found.deviations:
        left = [
            (
                item.op,
                item.key,
                "" if item.layer is None else str(item.layer),
                f"{item.error:.2g}",
                f"{item.allowed:.2g}",
            )
            for item in found.deviations
        ]
        headers = ("operation", "parameter used last", "layer", "relative error", "rounding explains")
        parts += [
            "<h2>Operations that left the band</h2><p>In the order of their calls, the first of them.</p>",
            _table(headers, left, numbers=(3, 4)),
        ]
    return "".join(parts)


def _semantics(meanings: Sequence[Meaning]) -> str:
    if not meanings:
        return ""

    def side(answer: Answer | None) -> str:
        return "not known" if answer is None else answer.describe()

    rows = [(meaning.name, side(meaning.ours), side(meaning.theirs)) for meaning in meanings]
    return (
        "<h2>Request parameters</h2><p>What each side makes of them, and whether what it draws from known logits is "
        "distributed as they ask.</p>" + _table(("parameter", "first", "second"), rows)
    )


def _plots(compared: Comparison) -> str:
    found = ["<h2>KL along positions</h2>", _along_positions(compared)]
    filled = [entry for entry in compared.by_margin if entry.positions]
    shares = [
        (
            f"{entry.low:g}–{entry.high:g}" if math.isfinite(entry.high) else f"over {entry.low:g}",
            entry.agreeing / entry.positions,
            f"{entry.agreeing} of {entry.positions}",
        )
        for entry in filled
    ]
    found += [
        "<h2>Agreement by margin</h2>",
        bars(
            shares, Axis(low=0, high=1, label="share with the same likeliest token"), "margin of the first side, nats"
        ),
    ]
    if compared.layer_errors:
        errors = list(compared.layer_errors.items())
        axis = log_axis([value for _, value in errors], "relative error", 1e-12)
        values = [(name, value, f"{value:.2g}") for name, value in errors]
        found += ["<h2>Error of layers</h2>", bars(values, axis, "results of norms, in order")]
    return "".join(found)


def _along_positions(compared: Comparison) -> str:
    points = [
        (
            case.first_position + index,
            max(value, LEAST_KL),
            f"{case.name}, position {case.first_position + index}: {value:.2g}",
        )
        for case in compared.cases
        for index, value in enumerate(case.kl)
    ]
    last = max(position for position, _, _ in points)
    x = Axis(low=0, high=float(last), label="position in its text")
    y = log_axis([value for _, value, _ in points], "KL in nats", LEAST_KL)
    level = compared.judgement.band["mean"]
    return dots(points, x, y, level if y.low <= level <= y.high else None)


def _cases(cases: Sequence[CaseResult]) -> str:
    rows = [
        (
            case.name,
            str(len(case.kl)),
            f"{sum(case.kl) / len(case.kl):.2g}",
            f"{max(case.kl):.2g}",
            f"{case.agreement:.1%}",
            "the same"
            if case.flip is None
            else f"parts at {case.flip.at}; margins {case.flip.margin:.2g} and {case.flip.other_margin:.2g}",
        )
        for case in cases
    ]
    headers = ("prompt", "positions", "mean KL", "largest KL", "agreement", "greedy text")
    texts = "".join(
        f"<details><summary>{html.escape(case.name)}</summary>"
        + _table(("text", "first goes on", "second goes on"), [(case.text, case.our_text, case.their_text)], pre=True)
        + "</details>"
        for case in cases
    )
    return "<h2>Prompts</h2>" + _table(headers, rows, numbers=range(1, 5)) + "<h2>Texts</h2>" + texts


def _divergence(value: Divergence) -> tuple[str, ...]:
    estimates = (value.mean, value.median, value.p99)
    return str(value.positions), *(_estimate(item, ".2g") for item in estimates), f"{value.largest:.2g}"


def _estimate(value: Estimate, form: str) -> str:
    return f"{value.value:{form}} ({value.low:{form}} … {value.high:{form}})"


def _table(
    headers: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = (), *, pre: bool = False
) -> str:
    right = {*numbers}

    def cell(tag: str, index: int, text: str) -> str:
        content = html.escape(text)
        if pre and tag == "td":
            content = f"<pre>{content}</pre>"
        return f"<{tag}{' class=n' if index in right else ''}>{content}</{tag}>"

    head = "".join(cell("th", index, text) for index, text in enumerate(headers))
    body = "".join(
        "<tr>" + "".join(cell("td", index, text) for index, text in enumerate(row)) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"
