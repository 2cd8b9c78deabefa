"""Figures that others published of their estimators, on their data and splits, to stand beside ours.

Start reading at `PUBLISHED_FIGURES`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

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
        """`95 % to 98 %`, `24 s`."""
        if self.unit != "share":
            return (
                f"{self.low:g} {self.unit}" if self.low == self.high else f"{self.low:g} to {self.high:g} {self.unit}"
            )
        return f"{self.low:.0%}" if self.low == self.high else f"{self.low:.0%} to {self.high:.0%}"

    def to_mapping(self) -> dict:
        return asdict(self)


def _accuracy(
    target: str, rows: str, bins: str, low: float, high: float | None = None, bin_gb: tuple[int, ...] = ()
) -> PublishedFigure:
    measure = f"accuracy, 3-fold, {bins}"
    return PublishedFigure(
        target=target,
        estimator="GPUMemNet",
        rows=rows,
        measure=measure,
        low=low,
        high=high or low,
        source=GPUMEMNET,
        bin_gb=bin_gb,
    )


def _mean_error(estimator: str, value: float) -> PublishedFigure:
    rows, measure = "well-known models (realworld)", "mean relative error"
    return PublishedFigure(
        target="memory", estimator=estimator, rows=rows, measure=measure, low=value, high=value, source=GPUMEMNET
    )


def _inference(model: str, low: float, high: float) -> PublishedFigure:
    measure = "inference alone, mean, on a GPU; its model's description is parsed before"
    return PublishedFigure(
        target="memory",
        estimator=f"GPUMemNet, {model}",
        rows="its own rows",
        measure=measure,
        low=low,
        high=high,
        source=OVERHEADS,
        unit="ms",
    )


def _xmem(measure: str, value: float, unit: str) -> PublishedFigure:
    return PublishedFigure(
        target="memory",
        estimator="xMem",
        rows="its own models",
        measure=measure,
        low=value,
        high=value,
        source=XMEM,
        unit=unit,
    )


_LEVELS = "low/medium/high"
_UTILIZATION = {  # family -> accuracy of SMACT, SMOCC, DRAMA
    "mlp": (0.92, 0.94, 0.88),
    "cnn": (0.77, 0.71, 0.73),
    "transformer": (0.82, 0.68, 0.62),
}

PUBLISHED_FIGURES: tuple[PublishedFigure, ...] = (
    _accuracy("memory", "mlp", "1 to 2 GB bins", 0.95, 0.98, (1, 2)),
    _accuracy("memory", "cnn", "8 GB bins", 0.81, 0.83, (8,)),
    _accuracy("memory", "transformer", "8 GB bins", 0.86, 0.88, (8,)),
    _mean_error("GPUMemNet", 0.57),
    _mean_error("FakeTensor", 0.46),
    _mean_error("Horus", 0.67),
    _inference("MLP-based", 2.29, 2.37),
    _inference("Transformer-based", 10.69, 10.72),
    _xmem("median relative error, about", 0.04, "share"),
    _xmem("time of one estimate", 24.0, "s"),
    *(
        _accuracy(target, family, _LEVELS, values[k])
        for family, values in _UTILIZATION.items()
        for k, target in enumerate(("smact", "smocc", "drama"))
    ),
)


def published_figures(target: str) -> tuple[PublishedFigure, ...]:
    """Those of one target; none for a target that nobody published."""
    return tuple(figure for figure in PUBLISHED_FIGURES if figure.target == target)
