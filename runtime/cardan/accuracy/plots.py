"""Plots as SVG text that a page holds inline: lines, bars and dots over linear or logarithmic axes.

They know no record and no page. Colours come from the page's own variables, so that they follow its light and dark.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 12, 14, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One axis.

    Attributes:
        low: where it begins.
        high: where it ends.
        log: whether it is logarithmic.
        label: what it shows.
    """

    low: float
    high: float
    log: bool = False
    label: str = ""

    def share(self, value: float) -> float:
        """Where a value lies, 0 at the beginning and 1 at the end; values beyond are put on the edge."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, self.low))
        return min(max((at - low) / ((high - low) or 1.0), 0.0), 1.0)

    def ticks(self) -> list[float]:
        """Values to mark."""
        if self.log:
            first, last = math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9)
            step = max(1, (last - first) // 5)
            return [10.0**power for power in range(first, last + 1, step)]
        return [self.low + (self.high - self.low) * part / 4 for part in range(5)]


def log_axis(values: Sequence[float], label: str, floor: float) -> Axis:
    """A logarithmic axis of whole powers of ten around values, none below ``floor``."""
    positive = [value for value in values if value > floor] or [floor * 10]
    low = 10.0 ** math.floor(math.log10(max(min(positive), floor)))
    high = 10.0 ** math.ceil(math.log10(max(positive)) + 1e-9)
    return Axis(low=low, high=max(high, low * 10), log=True, label=label)


def _frame(x: Axis, y: Axis, names: Sequence[str] = ()) -> list[str]:
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(y.label)}">']
    for tick in y.ticks():
        at = _y(y, tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{tick:.3g}</text>')
    marked = [] if names else x.ticks()
    parts += [
        f'<text x="{_x(x, tick):.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{tick:.3g}</text>'
        for tick in marked
    ]
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x.label)}</text>')
    return parts


def _x(axis: Axis, value: float) -> float:
    return LEFT + axis.share(value) * (WIDTH - LEFT - RIGHT)


def _y(axis: Axis, value: float) -> float:
    return HEIGHT - BOTTOM - axis.share(value) * (HEIGHT - TOP - BOTTOM)


def dots(points: Sequence[tuple[float, float, str]], x: Axis, y: Axis, level: float | None = None) -> str:
    """Dots with a text each, and a level that is marked by a dashed line."""
    parts = _frame(x, y)
    for across, up, text in points:
        parts.append(
            f'<circle cx="{_x(x, across):.1f}" cy="{_y(y, up):.1f}" r="2.2"><title>{html.escape(text)}</title></circle>'
        )
    if level is not None:
        at = _y(y, level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
    return "".join((*parts, "</svg>"))


def bars(values: Sequence[tuple[str, float, str]], y: Axis, label: str) -> str:
    """Bars with a name and a text each; names are written where there is room."""
    count = max(len(values), 1)
    x = Axis(low=0, high=count, label=label)
    parts = _frame(x, y, [name for name, _, _ in values])
    width = (WIDTH - LEFT - RIGHT) / count
    for index, (name, value, text) in enumerate(values):
        top = _y(y, value)
        parts.append(
            f'<rect x="{LEFT + index * width + width * 0.12:.1f}" y="{top:.1f}" width="{width * 0.76:.1f}" '
            f'height="{HEIGHT - BOTTOM - top:.1f}"><title>{html.escape(f"{name}: {text}")}</title></rect>'
        )
        if count <= 10:
            middle = LEFT + (index + 0.5) * width
            parts.append(
                f'<text x="{middle:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{html.escape(name)}</text>'
            )
    return "".join((*parts, "</svg>"))
