"""Figures that others published of their estimators, on their data and splits, to stand beside ours.

Start reading at `PUBLISHED_FIGURES`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GPUMEMNET = "GPUMemNet, arXiv 2602.17817"
OVERHEADS = "GPUMemNet's repository (github.com/itu-rad/GPUMemNet), Ensemble/Overheads.md"
XMEM = "xMem, Middleware 2025"


@dataclass(frozen=True, kw_only=True)
class PublishedFigure:
    """One figure as its authors give it. `low` and `high` are equal where they give one value; shares lie in [0, 1].

    rows     of what it is: a family of configurations, a set of models
    measure  what the figure is, with bins and split
    unit     share, ms or s
    bin_gb   widths of the memory classes that an accuracy is of
    """

    target: str
    estimator: str
    rows: str
    measure: str
    low: float
    high: float
    source: str
    unit: str = "share"
    bin_gb: tuple[int, ...] = ()

    @property
    def text(self) -> str:
        """Return it as `95% to 98%` or `24 s`."""
        low, high = (f"{value:.0%}" if self.unit == "share" else f"{value:g}" for value in (self.low, self.high))
        return (low if low == high else f"{low} to {high}") + ("" if self.unit == "share" else f" {self.unit}")


def _gpumemnet(
    target: str, rows: str, measure: str, low: float, high: float | None = None, **more: Any
) -> PublishedFigure:
    return PublishedFigure(
        target=target,
        estimator="GPUMemNet",
        rows=rows,
        measure=f"accuracy, 3-fold, {measure}",
        low=low,
        high=high or low,
        source=GPUMEMNET,
        **more,
    )


def _of_memory(estimator: str, rows: str, measure: str, low: float, high: float, **more: Any) -> PublishedFigure:
    return PublishedFigure(target="memory", estimator=estimator, rows=rows, measure=measure, low=low, high=high, **more)


_KNOWN = ("well-known models (realworld)", "mean relative error")
_INFERENCE = ("its own rows", "inference alone, mean, on a GPU; its model's description is parsed before")
_XMEM = "its own models"
_UTILIZATION = {  # family -> accuracy of SMACT, SMOCC, DRAMA
    "mlp": (0.92, 0.94, 0.88),
    "cnn": (0.77, 0.71, 0.73),
    "transformer": (0.82, 0.68, 0.62),
}

PUBLISHED_FIGURES: tuple[PublishedFigure, ...] = (
    _gpumemnet("memory", "mlp", "1 to 2 GB bins", 0.95, 0.98, bin_gb=(1, 2)),
    _gpumemnet("memory", "cnn", "8 GB bins", 0.81, 0.83, bin_gb=(8,)),
    _gpumemnet("memory", "transformer", "8 GB bins", 0.86, 0.88, bin_gb=(8,)),
    _of_memory("GPUMemNet", *_KNOWN, 0.57, 0.57, source=GPUMEMNET),
    _of_memory("FakeTensor", *_KNOWN, 0.46, 0.46, source=GPUMEMNET),
    _of_memory("Horus", *_KNOWN, 0.67, 0.67, source=GPUMEMNET),
    _of_memory("GPUMemNet, MLP-based", *_INFERENCE, 2.29, 2.37, source=OVERHEADS, unit="ms"),
    _of_memory("GPUMemNet, Transformer-based", *_INFERENCE, 10.69, 10.72, source=OVERHEADS, unit="ms"),
    _of_memory("xMem", _XMEM, "median relative error, about", 0.04, 0.04, source=XMEM),
    _of_memory("xMem", _XMEM, "time of one estimate", 24.0, 24.0, source=XMEM, unit="s"),
    *(
        _gpumemnet(target, family, "low/medium/high", values[k])
        for family, values in _UTILIZATION.items()
        for k, target in enumerate(("smact", "smocc", "drama"))
    ),
)


def published_figures(target: str) -> tuple[PublishedFigure, ...]:
    """Return those of one target; none for a target that nobody published."""
    return tuple(figure for figure in PUBLISHED_FIGURES if figure.target == target)
