"""Draws the difference of a label, a dot a configuration, over its size before. Start reading at `shift_chart`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from farm.comparison.pairs import Pair
from farm.comparison.view import figure, percent

_WIDTH, _HEIGHT = 560.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 66.0, 16.0, 14.0, 40.0


def shift_chart(
    pairs: Sequence[Pair], label: str, unit: str, css: Mapping[str, str], tolerance: float
) -> str | None:  # fmt: skip
    """SVG; None where no pair has figures. `css`: family -> class of its dots; dashed lines show the tolerance."""
    dots = [(pair, pair.before.labels[label], shift) for pair in pairs if (shift := pair.shift(label)) is not None]
    dots = [(pair, size, shift) for pair, size, shift in dots if size and size > 0]
    if not dots:
        return None
    sizes = [size for _, size, _ in dots]
    low, high = math.log10(min(sizes)) - 0.05, math.log10(max(sizes)) + 0.05
    reach = 1.15 * max([abs(shift) for _, _, shift in dots] + [1.3 * tolerance, 1e-4])

    def x(size: float) -> float:
        return _LEFT + (math.log10(size) - low) / (high - low) * (_WIDTH - _LEFT - _RIGHT)

    def y(shift: float) -> float:
        middle = (_TOP + _HEIGHT - _BOTTOM) / 2
        return middle - shift / reach * (_HEIGHT - _TOP - _BOTTOM) / 2

    drawn = []
    for tick in _ticks(reach):
        drawn.append(f'<path class="grid" d="M{_LEFT:g} {y(tick):.1f}H{_WIDTH - _RIGHT:g}"/>')
        drawn.append(
            f'<text class="axis" x="{_LEFT - 7:g}" y="{y(tick) + 4:.1f}" text-anchor="end">{_percent(tick)}</text>'
        )
    drawn.append(f'<path class="zero" d="M{_LEFT:g} {y(0):.1f}H{_WIDTH - _RIGHT:g}"/>')
    for edge in (tolerance, -tolerance):
        drawn.append(f'<path class="limit" d="M{_LEFT:g} {y(edge):.1f}H{_WIDTH - _RIGHT:g}"/>')
    for size in _decades(min(sizes), max(sizes)):
        drawn.append(
            f'<text class="axis" x="{x(size):.1f}" y="{_HEIGHT - _BOTTOM + 18:g}" text-anchor="middle">{size:,g}</text>'
        )
    drawn.append(
        f'<text class="axis" x="{(_LEFT + _WIDTH - _RIGHT) / 2:g}" y="{_HEIGHT - 5:g}" text-anchor="middle">'
        f"before, {escape(unit)}</text>"
    )
    for pair, size, shift in dots:
        said = f"{pair.config_hash} ({pair.before.family}): {figure(size)} {unit}, {percent(shift)}"
        drawn.append(
            f'<circle class="dot {css[pair.before.family]}" cx="{x(size):.1f}" cy="{y(shift):.1f}" r="3.6">'
            f"<title>{escape(said)}</title></circle>"
        )
    words = f"Relative difference of {label} over its size before, {len(dots):,} configurations"
    return (
        f'<svg width="{_WIDTH:g}" height="{_HEIGHT:g}" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" '
        f'aria-label="{escape(words)}">{"".join(drawn)}</svg>'
    )


def _ticks(reach: float) -> list[float]:
    """Round figures on both sides of zero, two or three on each."""
    power = 10.0 ** math.floor(math.log10(reach / 2))
    step = max(m * power for m in (1, 2, 5) if m * power <= reach / 2)
    count = math.floor(reach / step + 1e-9)
    return [k * step for k in range(-count, count + 1)]


def _percent(tick: float) -> str:
    return "0" if abs(tick) < 1e-12 else f"{100 * tick:+.4g} %"


def _decades(low: float, high: float) -> list[float]:
    """1, 2 and 5 of each decade between the two, thinned where there are many; the ends where there are none."""
    found = [
        m * 10.0**e
        for e in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        for m in (1, 2, 5)
        if low <= m * 10.0**e <= high
    ]
    if len(found) > 8:
        found = [size for size in found if math.isclose(math.log10(size) % 1, 0, abs_tol=1e-9)]
    if len(found) > 1:
        return found
    return sorted({float(figure(low).replace(",", "")), float(figure(high).replace(",", ""))})
