"""Shapes of a chart as SVG, every text escaped. Start reading at `Drawing`."""

from __future__ import annotations

from html import escape
from typing import Literal, TypeAlias

from conf.reports.page_text import Markup, clean_text

LETTER_PX = 7.7  # width of a digit at 12 pixels in the widest of the usual system fonts (DejaVu Sans, Verdana)
Anchor: TypeAlias = Literal["start", "middle", "end"]


class Svg(Markup):
    """Finished markup of a picture. Only `Drawing.svg` makes one."""

    __slots__ = ()


class Drawing:
    """Collects the shapes of one picture, in the order in which they are drawn. Lengths are in pixels."""

    def __init__(self) -> None:
        self._shapes: list[str] = []

    def text(self, css: str, x: float, y: float, content: str, anchor: Anchor = "middle", title: str = "") -> None:
        self._shapes.append(
            f'<text class="{css}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f"{_escaped(content)}{_title(title)}</text>"
        )

    def path(self, css: str, d: str, title: str = "") -> None:
        """Add a line or an area; `d` is SVG path data."""
        self._shapes.append(f'<path class="{css}" d="{d}">{_title(title)}</path>')

    def rect(
        self, css: str, x: float, y: float, width: float, height: float, *, title: str = "", radius: float = 0.0
    ) -> None:
        corner = f' rx="{radius:g}"' if radius else ""
        self._shapes.append(
            f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"{corner}>'
            f"{_title(title)}</rect>"
        )

    def circle(self, css: str, x: float, y: float, radius: float, title: str = "") -> None:
        self._shapes.append(f'<circle class="{css}" cx="{x:.1f}" cy="{y:.1f}" r="{radius:g}">{_title(title)}</circle>')

    def svg(self, width: float, height: float, label: str, *, css: str = "") -> Svg:
        """Return the picture.

        Args:
            width, height: in pixels.
            label: what the picture shows, for readers who cannot see it.
            css: a class whose pictures take the page's width; without one the picture keeps its size.
        """
        size = f'class="{css}"' if css else f'width="{width:.0f}" height="{height:.0f}"'
        return Svg(
            f'<svg {size} viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{_escaped(label)}">'
            f"{''.join(self._shapes)}</svg>"
        )


def _escaped(text: str) -> str:
    return escape(clean_text(text))


def _title(text: str) -> str:
    return f"<title>{_escaped(text)}</title>" if text else ""
