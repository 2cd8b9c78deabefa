"""`python -m learn.fit_bound`: fit the bound by causes to measured jobs, and judge it on left-out ones.

Start reading at `fit_bound`. It writes the file that `learn.estimation.job_estimate` reads.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conf.cli.command_line import command
from conf.cli.settings import Checked, key
from conf.errors import UsageError
from conf.files.outputs import output_problems, write_file
from conf.plain_text import count_of
from learn.estimation.bounds import CONTEXT, FRAGMENTATION, KERNELS, MEASURED, WORKSPACES
from learn.estimation.job_estimate import COVERAGES
from learn.estimators.protocol import LEVEL, PACKAGED_SHARES, BoundShares, bound_shares, group_score, held_of
from learn.judging.evaluate import held_out_by, left_out_errors

AXES = {"family": "families", "source": "sources", "device": "GPU models"}  # each value is left out in turn
LEAST_ROWS = 30
LEAST_GROUPS = 4  # values that an axis needs before leaving one out is meaningful
MOST_OVER = 0.15  # median share of the need by which a bound may exceed it
_CONTRADICTS = 1.5  # times the estimate: such a row is probably of another job; it is judged but not fitted on
# The causes that rows can separate. Too few rows are moved by any of the others alone, which stay in proportion.
_FITTED = (WORKSPACES, KERNELS)
# Instrument -> causes that it shows: torch counts no context, and its allocated memory includes no caches.
_MOVED_BY = {
    "allocated": (WORKSPACES, KERNELS),
    "reserved": (WORKSPACES, KERNELS, FRAGMENTATION),
    "process": (WORKSPACES, KERNELS, FRAGMENTATION, CONTEXT),
    "card": (WORKSPACES, KERNELS, FRAGMENTATION, CONTEXT),
}


@dataclass(frozen=True, kw_only=True)
class FitBoundSettings(Checked):
    """Rows to fit on. Raises `UsageError` that names every bad key together.

      python -m learn.fit_bound rows=answers.jsonl out=bound_by_causes.json

    `answers.jsonl` has one JSON object a line for each measured job, answered by this checkout with estimator=trace:
    source,
    family, device, kind (process, card, reserved or allocated), measured_mib, point_mib (the estimate of that kind) and
    causes (`uncertain` of the estimate). Other keys are ignored. A line with `traced` false counts as refused.

    The fit learns how much each cause widens the bound. Families, sources and GPU models are left out in turn. The
    bound is widened until it holds for 99 % of their rows, or until its median is 15 % over the need. The shares that
    held are printed and stored in the file. Rows 1.5 times above their estimate are judged but not fitted on.
    """

    rows: str = key(help="file of answers beside measurements, JSON lines", kind="path")
    out: str | None = key(
        None, "file to write; default learn/estimation/bound_by_causes.json of this checkout", "new path"
    )

    def problems(self) -> Iterator[str]:
        if not Path(self.rows).is_file():
            yield f"rows={self.rows}: there is no such file"
        yield from output_problems(self.path)

    @property
    def path(self) -> Path:
        """The file to write."""
        return PACKAGED_SHARES if self.out is None else Path(self.out)


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Measured rows with their estimates.

    Args:
        above_mib: (n,) measured memory minus the estimate, in MiB.
        measured_mib: (n,) measured memory in MiB.
        causes_mib: (n, 4) margins by cause, as the packaged shares make them.
        groups: Axis -> (n,) names.
        refused: Rows without an answer.
    """

    above_mib: np.ndarray
    measured_mib: np.ndarray
    causes_mib: np.ndarray
    groups: Mapping[str, np.ndarray]
    refused: int = 0


def read_answers(path: Path) -> Answers:
    """Return the rows of a file. Raises `UsageError` that names the first invalid line, or for too few."""
    rows: list[Mapping[str, Any]] = []
    refused = 0
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        try:
            row = json.loads(line)
            if row.get("traced") is False:
                refused += 1
                continue
            moved_by = _MOVED_BY[row["kind"]]
            mib = [float(row[name]) for name in ("measured_mib", "point_mib")]
            causes = [float(row["causes"].get(cause, 0.0)) if cause in moved_by else 0.0 for cause in MEASURED]
            if not (np.isfinite([*mib, *causes]).all() and min(mib) > 0):
                raise ValueError("memory is a number above 0")
            names = {axis: str(row[axis]) for axis in AXES}
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            wanted = ", ".join((*AXES, "kind", "measured_mib", "point_mib", "causes"))
            raise UsageError(f"{path}, line {number}: no row with {wanted}: {error!r}") from error
        rows.append({"mib": mib, "causes": causes, **names})
    if len(rows) < LEAST_ROWS:
        raise UsageError(f"{path} has {count_of(len(rows), 'row')} with an answer; a fit takes {LEAST_ROWS}")
    memory_mib = np.array([row["mib"] for row in rows])
    groups = {axis: np.array([row[axis] for row in rows]) for axis in AXES}
    groups["family"] = np.array([f"{row['source']}: {row['family']}" for row in rows])
    return Answers(
        above_mib=memory_mib[:, 0] - memory_mib[:, 1],
        measured_mib=memory_mib[:, 0],
        causes_mib=np.array([row["causes"] for row in rows]),
        groups=groups,
        refused=refused,
    )


def fit_bound(answers: Answers) -> BoundShares:
    """Return the shares of the causes, the margin's distribution, and the share of left-out rows that held.

    All causes' shares are widened by one factor. Axes of fewer than 4 values are not left out.

    Raises:
        UsageError: No axis has enough values to leave one out.
    """
    axes = {axis: names for axis, names in answers.groups.items() if len(set(names)) >= LEAST_GROUPS}
    if not axes:
        raise UsageError(f"to leave one out takes {LEAST_GROUPS} families, sources or devices; the rows have fewer")
    plausible = answers.measured_mib < _CONTRADICTS * (answers.measured_mib - answers.above_mib)
    factors = _fit(answers, plausible)
    # Factor by which each row's bound may grow before it is 15 % over the need.
    affordable = (MOST_OVER * answers.measured_mib + answers.above_mib) / (answers.causes_mib @ factors)
    most = group_score(affordable[plausible], answers.groups["source"][plausible], 0.5)
    needs = {axis: _needs(answers, names, plausible) for axis, names in axes.items()}

    def wider(axis: str, rows: np.ndarray) -> float:
        rows = rows & plausible
        return min(max(group_score(needs[axis][rows], axes[axis][rows], LEVEL), 1.0), most)

    widest = max(axes, key=lambda axis: wider(axis, plausible))
    times = wider(widest, plausible)
    checked = (held_of(needs[axis], names, partial(wider, axis), AXES[axis]) for axis, names in axes.items())
    old = bound_shares().of_causes
    sources, counts = np.unique(answers.groups["source"], return_counts=True)
    return BoundShares(
        of_causes={**old, **{c: old[c] * times * float(f) for c, f in zip(MEASURED, factors, strict=True)}},
        scores=_scores(needs[widest][plausible] / times, axes[widest][plausible]),
        held=tuple(held for held in checked if held is not None),
        rows=dict(zip(map(str, sources), map(int, counts), strict=True)),
    )


def _needs(answers: Answers, names: np.ndarray, plausible: np.ndarray) -> np.ndarray:
    """Return (n,) each row's need over its margin, by shares that were fitted without its group."""

    def without(mask: np.ndarray) -> np.ndarray:
        margin_mib = answers.causes_mib @ _fit(answers, plausible & ~mask)
        return np.asarray(answers.above_mib / np.maximum(margin_mib, 1.0))

    return left_out_errors(answers.above_mib, held_out_by(names), without)


def _fit(answers: Answers, inside: np.ndarray) -> np.ndarray:
    """Return the factor of each cause, by 99 % quantile regression (Koenker and Bassett 1978) of measured minus
    estimated memory, as a share of the need. Sources have equal weight, and so have families of a source."""
    from scipy.optimize import linprog

    need_mib = answers.measured_mib[inside]
    table = answers.causes_mib[inside] / need_mib[:, None]
    above = answers.above_mib[inside] / need_mib
    weight = _even_out(answers, inside)
    free = [MEASURED.index(cause) for cause in _FITTED]
    unexplained = above - np.delete(table, free, axis=1).sum(axis=1)
    # Variables: the factors, then each row's excess over its margin. Slack below the margin is charged through the
    # margin.
    costs = np.concatenate([(1 - LEVEL) * weight @ table[:, free], weight])
    above_all = -np.hstack([table[:, free], np.eye(len(unexplained))])
    factors = np.ones(len(MEASURED))
    factors[free] = linprog(costs, A_ub=above_all, b_ub=-unexplained, bounds=(0, None)).x[: len(free)]
    return factors


def _even_out(answers: Answers, inside: np.ndarray) -> np.ndarray:
    weight = np.ones(int(inside.sum()))
    for axis in ("family", "source"):
        _, member = np.unique(answers.groups[axis][inside], return_inverse=True)
        weight /= np.bincount(member, weights=weight)[member]
    return np.asarray(weight / weight.sum())


def _scores(need: np.ndarray, names: np.ndarray) -> dict[float, float]:
    """Return coverage -> share of the 99 % margin; the estimate stays the middle."""
    scores = {coverage: group_score(need, names, coverage) for coverage in COVERAGES}
    return {
        coverage: float(np.clip(score, -1.0, 0.0) if coverage <= 0.5 else np.clip(score, 0.0, 1.0))
        for coverage, score in scores.items()
    } | {0.5: 0.0, LEVEL: 1.0}


def entry(settings: FitBoundSettings) -> None:
    """Fit, write, and print the shares that held on left-out rows."""
    answers = read_answers(Path(settings.rows))
    fitted = fit_bound(answers)
    write_file(settings.path, (json.dumps(asdict(fitted), indent=1) + "\n").encode())
    for cause in MEASURED:
        print(f"{cause}: {fitted.of_causes[cause]:.3g}")
    for held in fitted.held:
        print(f"{held.share:.1%} held on {held.rows:,} rows of {held.groups} left-out {held.kind}")
    if answers.refused:
        print(f"left out: {count_of(answers.refused, 'row')} without an answer")
    print(f"written: {settings.path}")


if __name__ == "__main__":
    command("fit_bound", entry)
