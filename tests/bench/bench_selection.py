"""The gain from choosing: rows that an estimator needs for a given error, by policy, of pools whose labels are known.

Start reading at `run`; `python -m tests.bench.bench_selection [full=true] [data=FOLDER] [runs=FOLDER]`.
Small by default; `full=true` takes a simulated pool of 5,000, whose traced steps are kept in `data`; `runs=FOLDER` is a
data folder with imported rows, for two more pools.
"""

from __future__ import annotations

import importlib.resources
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from farm.sampling.coverage import Known
from farm.sampling.forecast import Forecaster, Outlook
from farm.sampling.selection import CandidatePool, candidates, choose, merge_pools
from featurize.configs.dimensions import Space
from featurize.configs.space import space_of_mapping
from featurize.configs.trial import TrialConfig, config_hash
from featurize.device.device_spec import load_device
from learn.estimators.protocol import from_space, to_space
from learn.estimators.tabular import FeatureTable, LightGBMEstimator
from learn.job.training_job import Case
from learn.rows.data import Rows, Target, get_target, load_rows, utilization_bins
from learn.rows.step_store import StepStore
from tests.bench.selection_curves import compared
from tests.learn.learn_rows import make_rows

DEVICE = load_device("A100-SXM4-40GB")
# Every family but those of library models, whose steps take long to trace.
FAMILIES = ("mlp", "cnn", "transformer", "gpt", "vit", "unet", "rnn", "gnn", "dlrm", "moe", "diffusion")
QUICK = ("rnn", "gnn", "dlrm")
UTILIZATION = ("smact", "smocc", "drama")
GROWTH, FIRST = 1.5, 30  # rows of the first night, drawn at random, and by how much each night has more
ORACLE = "true error"  # draws by the error that `lightgbm` makes of each candidate, which nobody knows: a ceiling


@dataclass(frozen=True)
class Labelled:
    """A pool with labels: rows of n candidates, what is known of each, and the outlook on all of them.

    labels  target -> (n,) NaN where there is none; out_of_memory (n,): a run costs a row and gives no label
    judged  the targets whose errors are told; learners: of `LEARNERS`
    """

    name: str
    rows: Rows
    labels: Mapping[str, np.ndarray]
    out_of_memory: np.ndarray
    outlook: Outlook
    judged: tuple[str, ...]
    learners: tuple[str, ...] = ("lightgbm",)
    steps: StepStore = field(default_factory=StepStore)  # records of the rows' steps

    def of(self, target: str, places: np.ndarray) -> Rows:
        """Those of the rows that have the target's label."""
        places = places[np.isfinite(self.labels[target][places])]
        records = [
            replace(self.rows.records[place], label=float(self.labels[target][place]), censored=False)
            for place in places.tolist()
        ]
        return replace(self.rows, target=get_target(target), records=tuple(records))


class Looked:
    """An estimator for `choose` that knows the outlook already."""

    capacity_mib = DEVICE.memory_mib

    def __init__(self, labelled: Labelled) -> None:
        self._outlook = labelled.outlook
        self._place = {config_hash(config): i for i, config in enumerate(labelled.rows.configs)}

    def look(self, configs, progress=None) -> Outlook:
        places = np.array([self._place[config_hash(config)] for config in configs])
        outlook = self._outlook
        figures = {name: column[places] for name, column in outlook.figures.items()}
        return Outlook(figures, outlook.parameters[places], outlook.table[places], outlook.ways[places])


class Points(LightGBMEstimator):
    """The `lightgbm` estimator without its folds, which are for bounds only: a sixth of the time."""

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Points:
        self.target, self.table = rows.target, FeatureTable.learn(rows.cases)
        self.trees = self._train(self.table.matrix(rows.cases), to_space(rows.label, rows.target.space))
        return self

    def point(self, cases: Sequence[Case]) -> np.ndarray:
        return from_space(self._within(self.trees.predict(self.table.matrix(cases))), self.target.space)


class Hybrid:
    """The `hybrid` estimator's points."""

    def fit(self, rows: Rows, steps: StepStore | None = None) -> Hybrid:
        from learn.estimators.hybrid import HybridEstimator

        self._steps = steps
        self._inner = HybridEstimator().fit(rows, steps)
        return self

    def point(self, cases: Sequence[Case]) -> np.ndarray:
        return self._inner.predict(cases, self._steps).point


LEARNERS = {"lightgbm": Points, "hybrid": Hybrid}


def run(
    full: bool = False,
    data: str | None = None,
    runs: str | None = None,
    seeds: int | None = None,
) -> dict[str, float]:
    """Prints curves and ratios; returns `POOL_LEARNER_TARGET_ERROR_POLICY`: the least ratio of rows over the errors
    judged, uniform sampling's over the policy's, and `active_s` and `coverage_s`, the seconds of choosing out of
    100,000 candidates (small: 5,000)."""
    seeds = seeds or (5 if full else 2)
    pools = [simulated(5000, FAMILIES, data) if full else simulated(400, QUICK, data)]
    if runs is not None:
        pools += [imported(runs, "memory", ("lightgbm", "hybrid") if full else ("lightgbm",)), imported(runs, "smact")]
    result = {}
    for labelled in pools:
        for key, of_policy in learning_curves(labelled, seeds, most=1200 if full else 200).items():
            name = f"{labelled.name}, {key[0]}, {key[1]}"
            print(f"{name}: rows {' '.join(f'{n:.0f}' for n in of_policy['uniform'][0, :, 0])}")
            for (error, policy), (ratios, low, high) in compared(of_policy).items():
                ratios_text = "  ".join(f"{ratio:5.2f}" if ratio else " none" for ratio in ratios)
                print(f"{error:>8} {policy:>11}  {ratios_text}   [{low:.2f}, {high:.2f}]", flush=True)
                result[f"{labelled.name}_{key[0]}_{key[1]}_{error}_{policy}"] = min(ratios) if all(ratios) else 0.0
    result |= cost(100_000 if full else 5_000)
    return result


def simulated(n: int, families: Sequence[str], data: str | None) -> Labelled:
    """Published spaces, as many of each family, with what the trace and the allocator's simulation say of them: the
    same as the simulated device's labels."""

    each = -(-n // len(families))
    configs = merge_pools([candidates(space_of(family), "stratified", 0, 0, each) for family in families]).configs[:n]
    cases = [Case(config, DEVICE.name) for config in configs]
    steps = StepStore(data)
    if data is not None:
        steps.prepare(cases, workers=0)
    values = [steps.record(case).values for case in cases]
    memory = np.array([of_case["job_memory_mib"] for of_case in values])
    out = memory >= DEVICE.memory_mib
    labels = {"memory": memory} | {
        name: np.array([of_case[f"job_priced_{name}"] for of_case in values]) for name in UTILIZATION
    }
    return _labelled("simulated", configs, labels, out, ("memory", "smact"))


def imported(runs: str, judged: str, learners: tuple[str, ...] = ("lightgbm",)) -> Labelled:
    """Trusted rows of other people's MLPs, CNNs and transformers, together; for another target than memory only those
    that have its label: of many CNNs and of all transformers it was not measured."""
    rows = load_rows(runs, "memory", source="imported").trusted
    rows = rows.subset(np.isin(rows.family.astype(str), ("mlp", "cnn", "transformer")))
    hashes = np.array([config_hash(config) for config in rows.configs])
    rows = rows.subset(np.unique(hashes, return_index=True)[1])
    labels = {"memory": rows.label}
    for name in ("smact", "smocc"):
        trusted_rows = load_rows(runs, name, source="imported").trusted
        by_hash = {config_hash(c): label for c, label in zip(trusted_rows.configs, trusted_rows.label, strict=True)}
        labels[name] = np.array([by_hash.get(config_hash(config), np.nan) for config in rows.configs])
    has = np.isfinite(labels[judged])
    rows, labels = rows.subset(has), {name: label[has] for name, label in labels.items()}
    steps = StepStore()
    if "hybrid" in learners:
        steps = StepStore(runs)
        steps.prepare(rows.cases, workers=0)
    name = "imported" if judged == "memory" else f"imported with {judged}"
    return _labelled(name, rows.configs, labels, rows.censored, (judged,), learners, rows, steps)


def _labelled(
    name, configs: Sequence[TrialConfig], labels, out, judged, learners=("lightgbm",), rows=None, steps=None
) -> Labelled:
    rows = make_rows("memory", configs, labels["memory"]) if rows is None else rows
    labels = {target: np.where(out, np.nan, label) for target, label in labels.items()}
    outlook = Forecaster(device=DEVICE, workers=0).look(configs)
    return Labelled(name, rows, labels, out, outlook, judged, learners, steps or StepStore())


def learning_curves(labelled: Labelled, seeds: int, most: int) -> dict[tuple[str, str], dict[str, np.ndarray]]:
    """(learner, target) -> policy -> (seeds, nights, errors + 1): rows, then the errors on the 30 % of networks that
    are never chosen."""
    curves: dict[tuple[str, str], dict[str, list]] = {}
    synthetic = not labelled.name.startswith("imported")
    # Imported rows have no sequence of their own. The ceiling is of a learner and a target: it is told of those.
    policies = ("uniform", *(("stratified",) if synthetic else ()), "coverage", "active", ORACLE)
    for seed in range(seeds):
        random = np.random.default_rng(seed)
        group = labelled.rows.group.astype(str)
        groups = np.unique(group)
        held = np.isin(group, random.choice(groups, int(0.3 * len(groups)), replace=False))
        test, train = np.flatnonzero(held), np.flatnonzero(~held)
        first = random.choice(train, FIRST, replace=False)
        for policy in policies:
            # `uniform` takes a pool in its order, so that is drawn; the sequence begins anywhere.
            order = random.permutation(train)
            if policy != "uniform":
                order = np.roll(train, -int(random.integers(len(train))))
            nights = _nights(labelled, policy, first, order, _sizes(min(most, len(train))), seed)
            for target in labelled.judged:
                asked = labelled.of(target, test)
                for learner in labelled.learners:
                    if policy == ORACLE and (learner, target) != ("lightgbm", labelled.judged[0]):
                        continue
                    text_lines = [
                        (float(len(night)), *errors_of(asked, _told(labelled, learner, target, night, asked)).values())
                        for night in nights
                    ]
                    curves.setdefault((learner, target), {}).setdefault(policy, []).append(text_lines)
    return {
        key: {policy: np.array(of_policy) for policy, of_policy in by_policy.items()}
        for key, by_policy in curves.items()
    }


def _told(labelled: Labelled, learner: str, target: str, night: np.ndarray, asked: Rows) -> np.ndarray:
    return LEARNERS[learner]().fit(labelled.of(target, night), labelled.steps).point(asked.cases)


def _nights(labelled: Labelled, policy: str, first, order, sizes, seed) -> list[np.ndarray]:
    """Places of all rows that are known after each night."""
    rows, estimator = labelled.rows, Looked(labelled)
    hashes = [config_hash(config) for config in rows.configs]
    place = {name: i for i, name in enumerate(hashes)}
    pool = CandidatePool(
        tuple(rows.configs[i] for i in order),
        tuple(hashes[i] for i in order),
        tuple(map(int, order)),
        dict.fromkeys(sorted(set(rows.family)), len(rows)),
    )
    chosen, nights = first, []
    for night, size in enumerate(sizes):
        if size > len(chosen):
            if policy == ORACLE:
                new = _by_true_error(labelled, chosen, order, size - len(chosen), seed + night)
            else:
                known = Known(
                    frozenset(hashes[i] for i in chosen),
                    tuple(rows.configs[i] for i in chosen),
                    {name: label[chosen] for name, label in labelled.labels.items()},
                    labelled.out_of_memory[chosen],
                    np.full(len(chosen), np.nan),
                )
                choice = choose(policy, pool, known, size - len(chosen), estimator, seed)
                new = [place[one.config_hash] for one in choice.chosen]
            chosen = np.concatenate([chosen, new])
        nights.append(chosen)
    return nights


def _by_true_error(labelled: Labelled, chosen, order, n: int, seed: int) -> np.ndarray:
    from farm.sampling.selection import draw

    target = labelled.judged[0]
    asked = labelled.of(target, rest := np.setdiff1d(order, chosen))
    rest = rest[np.isfinite(labelled.labels[target][rest])]
    gap = _gap(asked, _told(labelled, "lightgbm", target, chosen, asked))
    return rest[draw(np.maximum(np.abs(gap), 1e-4) ** 2, n, seed)]


def _gap(rows: Rows, point: np.ndarray) -> np.ndarray:
    """label - estimate: of memory the logarithms, of ratios themselves."""
    return to_space(rows.label, rows.target.space) - to_space(point, rows.target.space)


def errors_of(rows: Rows, point: np.ndarray) -> dict[str, float]:
    """Return figures of |label - estimate|, as `_gap` has it: median, mean and 90th percentile; `wrong`: share of the
    rows told to be in another bin than they are; `bins`: the mean over the label's bins, by family, of the bins'
    own means, so that a bin of few rows counts like one of many (those of fewer than 5 are left out); `bound`: the 99th
    percentile of label - estimate, the margin that a bound over all rows would need."""
    gap = _gap(rows, point)
    is_in, predicted_bin = _bin_of(rows.target, rows.family, rows.label), _bin_of(rows.target, rows.family, point)
    cells = np.array([f"{family} {of_label}" for family, of_label in zip(rows.family, is_in, strict=True)])
    names, member, counts = np.unique(cells, return_inverse=True, return_counts=True)
    size = np.abs(gap)
    by_bin = [size[member == i].mean() for i in range(len(names)) if counts[i] >= 5]
    return {
        "median": float(np.median(size)),
        "mean": float(size.mean()),
        "p90": float(np.quantile(size, 0.9)),
        "wrong": float((is_in != predicted_bin).mean()),
        "bins": float(np.mean(by_bin)),
        "bound": float(np.quantile(gap, 0.99)),
    }


def _bin_of(target: Target, families: np.ndarray, values: np.ndarray) -> np.ndarray:
    """8 GB wide, 1 GB for MLPs; utilization: low, medium, high."""
    if target.is_memory:
        return (values // np.where(families.astype(str) == "mlp", 1024.0, 8192.0)).astype(int)
    return utilization_bins(target).classify(values, families.astype(str).tolist())


def cost(n: int) -> dict[str, float]:
    """Seconds of choosing 500 of `n` CNNs with 2,000 known rows of four labels, all of it: also sampling, forecasts."""
    space = space_of("cnn")
    known_configs = candidates(space, "stratified", 1, 0, min(2000, n // 2)).configs
    forecaster = Forecaster(device=DEVICE)
    figures = replace(forecaster, workers=0).look(known_configs).figures
    random = np.random.default_rng(0)
    out = figures["memory"] >= DEVICE.memory_mib
    noise = random.normal(0, 0.1, len(out))
    known = Known(
        frozenset(map(config_hash, known_configs)),
        known_configs,
        {"memory": figures["memory"] * np.exp(noise)}
        | {name: np.clip(figures[name] + noise / 3, 0, 1) for name in UTILIZATION},
        out,
        np.full(len(out), np.nan),
    )
    costs = {}
    for policy in ("coverage", "active"):
        began = time.perf_counter()
        choose(policy, candidates(space, policy, 0, 0, n), known, min(500, n // 10), forecaster)
        costs[f"{policy}_s"] = time.perf_counter() - began
        print(f"{policy}: {n:,} candidates in {costs[f'{policy}_s']:.1f} s", flush=True)
    return costs


def space_of(family: str) -> Space:
    from omegaconf import OmegaConf

    text = (importlib.resources.files("conf") / "arch" / f"{family}.yaml").read_text()
    return space_of_mapping(OmegaConf.to_container(OmegaConf.create(text)))


def _sizes(most: int) -> list[int]:
    sizes = [FIRST]
    while sizes[-1] * GROWTH <= most:
        sizes.append(int(sizes[-1] * GROWTH))
    return sizes


if __name__ == "__main__":
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    options = {"full": given.get("full") == "true", "seeds": int(given["seeds"]) if "seeds" in given else None}
    run(**options, **{name: given.get(name) for name in ("data", "runs")})
