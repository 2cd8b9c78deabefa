"""Whether choosing pays: rows that an estimator needs for a given error, by policy, of pools whose labels are known.

Start reading at `run`; `python tests/bench/bench_selection.py [full=true] [data=FOLDER] [runs=FOLDER] [png=FILE]`.
Small by default; `full=true` takes a simulated pool of 5,000, whose traced steps are kept in `data`; `runs=FOLDER` is a
data folder with imported rows, for a second pool.
"""

from __future__ import annotations

import importlib.resources
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from farm.choosing.forecast import Forecaster, Outlook
from farm.choosing.known_runs import Known
from farm.choosing.selection import POLICIES, Pool, candidates, choose
from farm.space import Space
from featurize.device_spec import load_device
from featurize.trial import config_hash
from learn.cases import Case
from learn.data import Rows, load_rows, make_rows
from learn.estimators import to_space
from learn.learned.features import FeatureTable
from learn.learned.lightgbm_estimator import LightGBMEstimator

DEVICE = load_device("A100-SXM4-40GB")
GROWTH, FIRST = 1.5, 30  # rows of the first night, drawn at random, and by how much each night has more
ERRORS = ("median", "mean", "p90", "bins")
JUDGED_AT = (0.3, 0.6, 1.0)  # shares of the most rows: the error of uniform sampling there is the one to reach


@dataclass(frozen=True)
class Labelled:
    """A pool with labels: rows, the same as candidates, and the outlook on all of them."""

    name: str
    rows: Rows
    outlook: Outlook


class Looked:
    """An estimator for `choose` that knows the outlook already."""

    capacity_mib = DEVICE.memory_mib

    def __init__(self, labelled: Labelled, widths: Callable[[Sequence], np.ndarray | None] | None = None) -> None:
        self._outlook, self._widths = labelled.outlook, widths
        self._place = {config_hash(config): i for i, config in enumerate(labelled.rows.configs)}

    def look(self, configs, progress=None) -> Outlook:
        return self._outlook.subset(np.array([self._place[config_hash(config)] for config in configs]))

    def widths(self, target: str, configs) -> np.ndarray | None:
        return None if self._widths is None else self._widths(configs)


class Points(LightGBMEstimator):
    """The `lightgbm` estimator without its folds, which are for bounds only: a sixth of the time."""

    def fit(self, rows: Rows) -> Points:
        self.target, self._table = rows.target, FeatureTable.learn(rows.cases)
        self._model = self._train(self._table.matrix(rows.cases), to_space(rows.label, rows.target.space))
        return self


class Corrected:
    """The `hybrid`'s correction alone: its features, trees and monotone curve, without bounds."""

    def __init__(self) -> None:
        self._inner = None

    def fit(self, rows: Rows) -> Corrected:
        from learn.learned.hybrid import HybridEstimator

        class OfPoints(HybridEstimator):
            def _held_out(self, rows, table, correction, weight, base):
                return base + correction  # as if it made no errors: only the bound is learned from them

            def _calibrated(self, rows, table, gap):
                return {}, [np.zeros(1)]

        self._inner = OfPoints().fit(rows)
        return self

    def predict(self, cases):
        return self._inner.predict(cases)


LEARNERS = {"lightgbm": Points, "hybrid": Corrected}


def run(
    full: bool = False,
    data: str | None = None,
    runs: str | None = None,
    png: str | None = None,
    seeds: int | None = None,
) -> dict[str, float]:
    """Prints curves and ratios; returns `SOURCE_LEARNER_ERROR_POLICY`: the least ratio of rows over the errors judged,
    uniform sampling's over the policy's, and `choose_s`, the seconds of active selection over 100,000 candidates."""
    seeds = seeds or (5 if full else 2)
    curves, result = {}, {}
    pools = [(simulated(5000 if full else 400, data), ("lightgbm",))]
    if runs is not None:
        learners = ("lightgbm", "hybrid") if full else ("lightgbm",)
        pools.append((imported(runs, learners), learners))
    for labelled, learners in pools:
        for learner in learners:
            key = f"{labelled.name}, {learner}"
            curves[key] = learning_curves(labelled, learner, seeds, most=2000 if full else 200)
            for (error, policy), ratios in compared(curves[key]).items():
                told = "  ".join(f"{ratio:6.2f}" if ratio else "  none" for ratio in ratios)
                print(f"{key:>28} {error:>7} {policy:>11}  {told}", flush=True)
                result[f"{labelled.name}_{learner}_{error}_{policy}"] = min(ratios) if all(ratios) else 0.0
    result |= cost(100_000 if full else 5_000)
    if png is not None:
        draw(curves, Path(png))
    return result


def simulated(n: int, data: str | None) -> Labelled:
    """CNNs of the published space, with the memory that the trace and the allocator's simulation give them."""
    from learn.step_store import features_of, prepare

    configs = candidates(space_of("cnn"), "stratified", 0, 0, n).configs
    cases = [Case(config, DEVICE.name) for config in configs]
    if data is not None:
        prepare(cases, data, workers=0)
    memory = np.array([features_of(case).values.get("job_memory_mib", np.nan) for case in cases])
    fits = memory < DEVICE.memory_mib
    rows = make_rows("memory", [c for c, ok in zip(configs, fits, strict=True) if ok], memory[fits])
    return _labelled("simulated", rows)


def imported(runs: str, learners: Sequence[str]) -> Labelled:
    """Every exact and trusted row of other people's MLPs, CNNs and transformers, together."""
    rows = load_rows(runs, "memory", source="imported").trusted.exact
    rows = rows.subset(np.isin(rows.family.astype(str), ("mlp", "cnn", "transformer")))
    hashes = [config_hash(config) for config in rows.configs]
    rows = rows.subset(np.unique(hashes, return_index=True)[1])
    if "hybrid" in learners:
        from learn.step_store import prepare

        prepare(rows.cases, runs, workers=0)
    return _labelled("imported", rows)


def _labelled(name: str, rows: Rows) -> Labelled:
    return Labelled(name, rows, Forecaster(device=DEVICE, workers=0).look(rows.configs))


def learning_curves(labelled: Labelled, learner: str, seeds: int, most: int) -> dict[str, np.ndarray]:
    """policy -> (seeds, nights, errors + 1): rows, then the errors on the 30 % of networks that are never chosen."""
    found: dict[str, list] = {}
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        groups = np.unique(labelled.rows.group.astype(str))
        held = np.isin(labelled.rows.group.astype(str), random.choice(groups, int(0.3 * len(groups)), replace=False))
        test, train = np.flatnonzero(held), np.flatnonzero(~held)
        sizes = _sizes(min(most, len(train)))
        first = random.choice(train, FIRST, replace=False)
        policies = ("uniform", "coverage", "active") if labelled.name == "imported" else (
            "uniform", "stratified", "coverage", "active"
        )  # fmt: skip
        for policy in policies:
            # `uniform` takes a pool in its order, so that is drawn; the sequence begins anywhere.
            order = (
                random.permutation(train) if policy == "uniform" else np.roll(train, -int(random.integers(len(train))))
            )
            found.setdefault(policy, []).append(_nights(labelled, learner, policy, first, order, test, sizes, seed))
    return {policy: np.array(of_policy) for policy, of_policy in found.items()}


def _nights(labelled: Labelled, learner: str, policy: str, first, order, test, sizes, seed) -> list[list[float]]:
    rows, estimator = labelled.rows, Looked(labelled)
    hashes = [config_hash(config) for config in rows.configs]
    place = {name: i for i, name in enumerate(hashes)}
    pool = Pool(
        tuple(rows.configs[i] for i in order), tuple(hashes[i] for i in order), tuple(map(int, order)),
        dict.fromkeys(sorted(set(rows.family)), len(rows)),
    )  # fmt: skip
    chosen, said = first, []
    for size in sizes:
        if size > len(chosen):
            known = Known(
                frozenset(hashes[i] for i in chosen),
                tuple(rows.configs[i] for i in chosen),
                {"memory": rows.label[chosen]},
                np.zeros(len(chosen), dtype=bool),
                np.full(len(chosen), np.nan),
            )
            night = choose(policy, pool, known, size - len(chosen), estimator, seed)
            chosen = np.concatenate([chosen, [place[one.config_hash] for one in night.chosen]])
        point = LEARNERS[learner]().fit(rows.subset(chosen)).predict(rows.subset(test).cases).point
        said.append([float(len(chosen)), *errors_of(rows.subset(test), point).values()])
    return said


def errors_of(rows: Rows, point: np.ndarray) -> dict[str, float]:
    """Of |log(point / label)|: over all rows; `bins`: the mean over the label's bins (8 GB wide; 1 GB for MLPs), by
    family, of the bins' own means, so that a bin of few rows counts like one of many. Bins of fewer than 5 are left
    out."""
    gap = np.abs(np.log(point / rows.label))
    width = np.where(rows.family.astype(str) == "mlp", 1024.0, 8192.0)
    cells = np.array([f"{f} {int(b)}" for f, b in zip(rows.family, rows.label // width, strict=True)])
    names, member, counts = np.unique(cells, return_inverse=True, return_counts=True)
    by_bin = [gap[member == i].mean() for i in range(len(names)) if counts[i] >= 5]
    return {
        "median": float(np.median(gap)),
        "mean": float(gap.mean()),
        "p90": float(np.quantile(gap, 0.9)),
        "bins": float(np.mean(by_bin)),
    }


def compared(curves: Mapping[str, np.ndarray]) -> dict[tuple[str, str], list[float | None]]:
    """(error, policy) -> for each error judged: how many times fewer rows than uniform sampling it takes; None where
    it never gets there. Of the means over seeds, as the least error so far, between the nights by the logarithms."""
    found = {}
    rows = curves["uniform"][0, :, 0]
    for column, error in enumerate(ERRORS, start=1):
        mean = {policy: np.minimum.accumulate(of[:, :, column].mean(0)) for policy, of in curves.items()}
        for policy in curves:
            if policy == "uniform":
                continue
            ratios = []
            for share in JUDGED_AT:
                at = share * rows[-1]
                wanted = np.exp(np.interp(np.log(at), np.log(rows), np.log(mean["uniform"])))
                needed = None
                if mean[policy][-1] <= wanted:
                    needed = np.exp(np.interp(-np.log(wanted), -np.log(mean[policy]), np.log(rows)))
                ratios.append(None if needed is None else float(at / needed))
            found[error, policy] = ratios
    return found


def cost(n: int) -> dict[str, float]:
    """Seconds of choosing 500 of `n` CNNs with 2,000 known rows, all of it: sampling, forecasts, the choice."""
    space = space_of("cnn")
    known_configs = candidates(space, "stratified", 1, 0, min(2000, n // 2)).configs
    forecaster = Forecaster(device=DEVICE)
    labels = replace(forecaster, workers=0).look(known_configs).figures["memory"]
    random = np.random.default_rng(0)
    known = Known(
        frozenset(map(config_hash, known_configs)),
        known_configs,
        {"memory": labels * np.exp(random.normal(0, 0.1, len(labels)))},
        labels >= DEVICE.memory_mib,
        np.full(len(labels), np.nan),
    )
    found = {}
    for policy in ("coverage", "active"):
        began = time.perf_counter()
        choose(policy, candidates(space, policy, 0, 0, n), known, min(500, n // 10), forecaster)
        found[f"{policy}_s"] = time.perf_counter() - began
        print(f"{policy}: {n:,} candidates in {found[f'{policy}_s']:.1f} s", flush=True)
    return found


def draw(curves: Mapping[str, Mapping[str, np.ndarray]], path: Path) -> None:
    """One panel a pool and learner: the mean over label bins against rows, mean and range over the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(curves), figsize=(4.6 * len(curves), 3.8), squeeze=False)
    for panel, (name, of_policy) in zip(panels[0], curves.items(), strict=True):
        for policy, values in of_policy.items():
            rows, errors = values[0, :, 0], values[:, :, 1 + ERRORS.index("bins")]
            color = f"C{POLICIES.index(policy)}"
            panel.plot(rows, errors.mean(0), marker=".", color=color, label=policy)
            panel.fill_between(rows, errors.min(0), errors.max(0), color=color, alpha=0.15)
        panel.set(xscale="log", yscale="log", xlabel="rows measured", title=name)
        panel.set_xticks(ticks := [30, 100, 300, 1000], map(str, ticks))
        panel.xaxis.set_minor_formatter("")
        panel.grid(True, which="both", alpha=0.2)
        panel.legend()
    panels[0][0].set_ylabel("error of memory, mean over its bins")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def space_of(family: str) -> Space:
    from omegaconf import OmegaConf

    text = (importlib.resources.files("conf") / "arch" / f"{family}.yaml").read_text()
    return Space.from_mapping(OmegaConf.to_container(OmegaConf.create(text)))


def _sizes(most: int) -> list[int]:
    sizes = [FIRST]
    while sizes[-1] * GROWTH <= most:
        sizes.append(int(sizes[-1] * GROWTH))
    return sizes


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    options = {"full": given.get("full") == "true", "seeds": int(given["seeds"]) if "seeds" in given else None}
    run(**options, **{name: given.get(name) for name in ("data", "runs", "png")})
