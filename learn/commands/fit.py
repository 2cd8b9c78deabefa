"""Fit one estimator, judge it on held-out rows, keep it as an artifact: `learn.fit`, and a growth cycle's `refit`.

Start reading at `fit`; `entry` prints a table of held-out figures and the artifact's path. `refit` promotes a candidate
unless it is worse than the current model: `compare` decides, on the same rows. Only promoted models are written: the
newest one under `models/` is current.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import warehouse
from conf.cli.command_line import StepBar
from conf.cli.settings import Checked, data_key, key
from conf.errors import CommandError, UsageError
from featurize.configs.features import group_key
from featurize.configs.trial import config_of_row
from featurize.job.code_names import trust_key
from learn.estimators.protocol import (
    ESTIMATORS,
    LEVEL,
    OF_CONFIGS,
    PREFERRED,
    Estimator,
    get_estimator,
    require_target,
    to_space,
)
from learn.fitting.artifacts import (
    Artifact,
    DataPlace,
    Promotion,
    StaleArtifact,
    newest,
    require_current,
    save_judged,
    versions,
)
from learn.judging.evaluate import CV_FOLDS, Evaluation, evaluate, judged, remarks
from learn.judging.scores import NOT_INFORMATIVE, exceeds, mean, median, values_of
from learn.rows.data import BIN_WIDTHS_GB, MIN_GROUPS, SLOWDOWN, TARGETS, Rows, get_target, load_rows, make_bins
from learn.rows.step_store import StepStore, with_suspects
from warehouse.files.folder import DataFolder

HELD_OUT_SHARE = 0.2  # share of configurations; changing it would let models see the rows that judged earlier ones
LEAST_JUDGES = 30  # rows with an exact label that neither model has seen
LEAST_FITTED = 30
CONFIDENCE = 0.95  # one-sided, for each limit
DRAWS = 2_000
ALLOWED_SHARE = 0.05  # share of the current model's mean error
# A smaller difference, by the space of errors, does not keep a newer model back: half of the 1 % of memory, and a tenth
# of the 0.05 of activity, by which a repeated configuration may differ before a machine counts as sick.
ALLOWED_AT_LEAST = {"log": 0.005, "ratio": 0.005}


@dataclass(frozen=True, kw_only=True)
class FitSettings(Checked):
    """The target to fit, and its rows. Raises `UsageError` that names every bad key together.

      python -m learn.fit target=memory
      python -m learn.fit target=drama family=cnn source=measured
      python -m learn.fit target=memory bin_gb=1 device_name=A100-SXM4-40GB

    30 % of the rows are held out, the rest is cross-validated in 3 folds; near-copies of a configuration stay on one
    side of every split. The artifact, models/TARGET/VERSION/ in the data folder, holds the model (fitted on all rows),
    meta.json, report.json and report.html with two plots.

    target=slowdown learns from the table collocations how much jobs slow each other down on one GPU; it takes data,
    source and device_name alone.

      python -m learn.fit target=slowdown data=pairs
    """

    target: str = key(help="what to estimate", choices=(*TARGETS, SLOWDOWN))
    estimator: str | None = key(
        None,
        "default hybrid, or lightgbm where all rows are simulated",
        choices=tuple(ESTIMATORS),
    )
    family: str = key("all", "one family, or all")
    source: str | tuple[str, ...] | None = key(
        None, "measured, simulated or imported; needed where the rows are of several", "text | list of text | null"
    )
    device_name: str | None = key(
        None, "as in runs.device_name; default all, needed where conf/device does not describe them all"
    )
    bin_gb: int | None = key(
        None, "width of the memory classes; default 1 for family=mlp, else 8", choices=BIN_WIDTHS_GB
    )
    snapshot: str | None = key(
        None, "name of one whose rows are taken instead of the folder's as it is; meta.json says which"
    )
    seed: int = key(0, "seed of splits and fits; same data and seed, same model", "int 0 to 2147483647")
    data: str | None = data_key()
    trust: tuple[str, ...] = trust_key()

    def problems(self) -> Iterator[str]:
        if self.target == SLOWDOWN:
            yield from foreign_keys(self, ("target", "source", "device_name", "data", "seed"))
        elif self.bin_gb is not None and not get_target(self.target).is_memory:
            yield f"bin_gb is for target=memory; target={self.target} has bins low, medium, high"


def foreign_keys(settings: Any, taken: Sequence[str], of: str = f"target={SLOWDOWN}") -> list[str]:
    """Return a problem that names the keys that are set although `of` does not take them."""
    set_keys = [
        field.name
        for field in fields(settings)
        if field.name not in taken and getattr(settings, field.name) not in (field.default, ())
    ]
    return [f"{', '.join(set_keys)}: {of} takes {', '.join(taken[1:])} alone"] if set_keys else []


@dataclass(frozen=True)
class Fit:
    """Result of a fit: the artifact's folder, its `meta.json`, and the evaluation behind the figures."""

    path: Path
    meta: dict[str, Any]
    evaluation: Evaluation


def fit(
    settings: FitSettings,
    *,
    now: datetime | None = None,
    progress: Callable[[str, int, int], None] = lambda _step, _done, _of: None,
) -> Fit:
    """Fit an estimator, judge it on held-out rows, and keep it as `models/TARGET/VERSION/` in the data folder.

    The figures are from fits that had not seen the rows they are judged on. The stored model is fitted on all rows.

    Args:
        settings: What to fit, on which rows.
        now: Time that names the version; time-zone aware. None is the current time.
        progress: Called as `progress(step, completed, total)` before each step: first for each traced job,
            then fits and the report; 0 of 0 where the number is not known yet.

    Returns:
        The artifact's folder, its `meta.json`, and the evaluation behind the figures.

    Raises:
        UsageError: There are too few rows, rows of several sources, or an estimator without the target.
            Nothing is written then.
    """
    if settings.target == SLOWDOWN:
        raise UsageError("target=slowdown: call learn.fit_slowdowns, which fits to groups of jobs")
    now = now or datetime.now(UTC)
    if settings.estimator is not None:
        require_target(get_estimator(settings.estimator), settings.target)
    progress("reading rows", 0, 0)
    rows = load_rows(
        settings.data,
        settings.target,
        settings.family,
        settings.source,
        settings.device_name,
        snapshot=settings.snapshot,
        trust=settings.trust,
    )
    # The hybrid, which starts from the trace, repeats the labels of simulated rows without learning anything; an
    # estimator that reads configurations alone learns from them.
    name = settings.estimator or (OF_CONFIGS if set(rows.source) == {"simulated"} else PREFERRED)
    kind = get_estimator(name)
    store = StepStore(settings.data)
    if kind.needs_trace:
        store.prepare(rows.cases, progress=partial(progress, "tracing jobs"))
        rows = with_suspects(rows, store)
    bins = make_bins(rows.target, rows.exact.label, rows.family, bin_gb=settings.bin_gb, ceiling_mib=rows.ceiling_mib)
    total, counter = CV_FOLDS + 3, itertools.count()  # the held-out test, the fit on all rows, the report
    evaluation = evaluate(
        name,
        rows,
        bins,
        settings.seed,
        lambda step: progress(step, next(counter), total),
        steps=store,
    )
    progress("fit on all rows", total - 2, total)
    estimator = kind(seed=settings.seed).fit(rows, store)

    notes = []
    if settings.estimator is None and name != PREFERRED:
        notes.append(
            f"estimator={name} by default: the labels of simulated rows are the trace's own figures, which {PREFERRED} "
            "repeats; choose another with estimator=NAME"
        )
    notes += estimator.predict(rows.cases[:1], store).warnings  # one case: only the model's warnings are wanted
    notes += [f"of the held-out figures: {text}" for text in evaluation.warnings if text not in notes]
    notes += remarks(kind, rows, bins)
    if settings.snapshot is not None:
        notes.append(
            f"fitted on the snapshot {settings.snapshot}; as the newest of its target it is what answers from now on"
        )
    progress("drawing the report", total - 1, total)
    path, meta = save_judged(
        settings.data,
        estimator,
        rows,
        evaluation,
        settings.seed,
        now,
        fitted_on="all",
        about={"warnings": notes, "snapshot": settings.snapshot},
    )
    return Fit(path, meta, evaluation)


def entry(settings: FitSettings) -> int:
    """Fit with the settings, and print the figures and the artifact's path. Returns the exit code."""
    if settings.target == SLOWDOWN:
        from learn.commands.sharing import fit_entry

        return fit_entry(settings)
    from conf.reports.blocks import Callout, Lead, print_blocks, table
    from learn.judging.report import metric_rows

    with StepBar(settings.target) as bar:
        fitted = fit(settings, progress=bar.update)
    rows = fitted.meta["rows"]
    families = ", ".join(f"{name} {n}" for name, n in rows["family"].items())
    print_blocks(
        Lead(
            f"{settings.target} by {fitted.meta['estimator']}: {rows['train'] + rows['test']} rows ({families}), "
            f"{', '.join(rows['source'])}, {', '.join(rows['device'])}"
        ),
        table(("metric", "3-fold CV", f"held out (n={rows['test']})"), metric_rows(fitted.evaluation)),
        Lead(f"bins: {fitted.meta['bins']['rule']}"),
        *map(Callout, fitted.meta["warnings"]),
        Lead(f"artifact: {fitted.path}"),
    )
    return 0


def refit(
    data: DataPlace,
    target: str,
    estimator: str = "hybrid",
    *,
    cycle: str,
    source: str | None = None,
    device_name: str | None = None,
    snapshot: str | None = None,
    trust: Sequence[str] = (),
    seed: int = 0,
    now: datetime | None = None,
    progress: Callable[[str], None] = lambda _step: None,
) -> Promotion:
    """Fit a candidate on all usable rows except the held-out ones, judge it beside the current model, and promote it if
    it is not worse. A second call for a cycle that has promoted one returns that decision and does nothing more.

    Rows (of `snapshot`, or the current ones) and the current model are selected by `source` and `device_name`, as in
    `learn.rows.data.load_rows`, and so is `trust`. Raises `UsageError` for an unknown target or estimator, an estimator
    without the target, and a missing data folder; too few rows are not an error (`skipped`). `now` is time-zone aware.
    """
    now = now or datetime.now(UTC)
    get_target(target)
    kind = get_estimator(estimator)
    require_target(kind, target)
    folder = DataFolder.resolve(data).open()
    if (recorded := _read_recorded(folder, target, estimator, cycle, source, device_name)) is not None:
        return recorded
    promotion_of = partial(Promotion, target=target, estimator=estimator, source=source, device_name=device_name)
    skipped = partial(promotion_of, decision="skipped", figures={"current": None, "candidate": None})
    steps = StepStore(folder)
    progress("reading rows")
    try:
        all_rows = load_rows(folder, target, source=source, device_name=device_name, snapshot=snapshot, trust=trust)
        rows, held_out, known = _sides(all_rows)
    except CommandError as error:
        return skipped(why=str(error))
    if kind.needs_trace:
        steps.prepare(rows.cases, progress=lambda completed, total: progress(f"tracing {completed:,}/{total:,} jobs"))
        all_rows = with_suspects(all_rows, steps)
    progress("fitting the candidate")
    try:
        rows, held_out, known = _sides(all_rows)
        fitted = kind(seed=seed).fit(known, steps)
    except CommandError as error:
        return skipped(why=str(error))
    progress("judging it")
    candidate = _judge(fitted, rows.subset(held_out), known, rows, steps)
    if not len(candidate.test_rows.exact):
        reasons = f": {candidate.refused[0]}" if candidate.refused else ""
        return skipped(why=f"none of the {int(held_out.sum())} rows held out can say how good it is{reasons}")
    current = newest(
        folder, target, estimator=estimator, device=device_name, source=source or str(rows.source[0]), stale=True
    )
    if current is None:
        verdict = _alone("first", "there was no model", candidate)
    else:
        try:
            answering, seen_groups = require_current(current).estimator, _seen_groups(folder, current, all_rows)
            unseen = np.array([group not in seen_groups for group in rows.group], dtype=bool)
            verdict = _beside(_judge(answering, rows.subset(held_out & unseen), known, rows, steps), candidate, seed)
        except StaleArtifact:
            verdict = _alone(
                "promoted",
                "the current one was fitted with features of other code and cannot answer any more",
                candidate,
            )
    promotion = promotion_of(current=None if current is None else current.version, **verdict)
    if promotion.decision == "kept":
        return promotion
    progress("drawing the report")
    notes = [*candidate.warnings, *remarks(kind, known, candidate.bins), *_notes(all_rows, candidate)]
    path, _ = save_judged(
        folder,
        fitted,
        known,
        replace(candidate, warnings=tuple(notes)),
        seed,
        _after(current, now),
        fitted_on="train",
        about={
            "warnings": notes,
            "fitted": "on the training rows alone; the held-out ones, a fifth of all configurations, never are",
            "snapshot": snapshot,
            "cycle": cycle,
            "promotion": asdict(promotion),
        },
    )
    return replace(promotion, candidate=path.name)


def _sides(all_rows: Rows) -> tuple[Rows, np.ndarray, Rows]:
    """Return the rows without doubt, the mask of those held out, and the other rows. Raises `UsageError` where too few
    rows remain to fit on."""
    rows = all_rows.trusted
    held_out = is_held_out(rows.group)
    known = rows.subset(~held_out)
    if len(known) < LEAST_FITTED:
        raise UsageError(
            f"{len(known)} of {len(rows)} rows are there to fit on, {LEAST_FITTED} are needed; the others are held out "
            "to judge by"
        )
    return rows, held_out, known


def _judge(estimator: Estimator, held_out: Rows, known: Rows, rows: Rows, steps: StepStore) -> Evaluation:
    bins = make_bins(rows.target, rows.exact.label, rows.family, ceiling_mib=rows.ceiling_mib)
    return judged(estimator.predict(held_out.cases, steps), held_out, bins, estimator.name, known)


def _notes(all_rows: Rows, candidate: Evaluation) -> Iterator[str]:
    if candidate.refused:
        yield f"rows held out without an answer are in no figure: {_reasons(candidate)}"
    if in_doubt := int((all_rows.doubt != "").sum()):
        yield (
            f"{in_doubt} rows are in doubt (runs.error says why, or the rows beside them do): neither fitted on nor "
            "judged"
        )


def is_held_out(groups: Iterable[Any]) -> np.ndarray:
    """Return (n,) bool: whether a row's near-copy group is in the fifth that no candidate is fitted on, by its key.

    It depends on the key alone, so rows keep their side from night to night and the held-out set only grows.
    """
    limit = int(HELD_OUT_SHARE * 2**64)
    digests = (hashlib.sha256(f"held out {key}".encode()).digest() for key in groups)
    return np.array([int.from_bytes(digest[:8], "big") < limit for digest in digests], dtype=bool)


def _alone(decision: str, reason: str, candidate: Evaluation) -> dict[str, Any]:
    """Return the verdict on a candidate without a model to compare it with."""
    ours, judges = figures(candidate), candidate.test_rows
    explanation = (
        f"its mean error is {ours['mean_abs_error']:.4f} ({in_words(judges.target.space)}), {ours['accuracy']:.0%} are "
        "in their estimated bin"
    )
    if "own_labels" in ours:
        explanation = f"its errors are {NOT_INFORMATIVE}: the trace simulated these very labels"
    return {
        "decision": decision,
        "why": f"{reason}; this one is fitted on {len(candidate.train_rows)} rows, and on {len(judges)} others held "
        f"out {explanation}",
        "held_out": len(judges),
        "figures": {"current": None, "candidate": ours},
    }


def _beside(current: Evaluation, candidate: Evaluation, seed: int) -> dict[str, Any]:
    """Return the verdict on the candidate and the current model, on held-out rows that neither has seen.

    Args:
        current: Evaluation of the current model, on the rows that it has not seen.
        candidate: Evaluation of the candidate, on all held-out rows.
        seed: Seed of the comparison.
    """
    ours = candidate.among(current.test_rows.run_ids)
    count, judges = len(current.test_rows), ours.test_rows
    n, groups = len(judges.exact), len(set(judges.exact.group))
    why = None
    if len(judges) < count:
        why = (
            f"the new one has no answer for {count - len(judges)} of {count} rows held out that the current one "
            f"answers: {_reasons(candidate)}"
        )
    elif n < LEAST_JUDGES or groups < MIN_GROUPS:
        why = (
            f"too few rows to judge by: {n} with a figure, of {groups} different configurations, are held out and not "
            f"seen by the current one either; {LEAST_JUDGES} rows of {MIN_GROUPS} configurations are needed"
        )
    if why is not None:
        return {
            "decision": "kept",
            "why": why,
            "held_out": len(judges),
            "figures": {"current": None, "candidate": figures(candidate)},
        }
    return compare(current, ours, seed)


def _reasons(candidate: Evaluation) -> str:
    return "; ".join(dict.fromkeys(candidate.refused))


def _seen_groups(folder: DataFolder, artifact: Artifact, rows: Rows) -> frozenset[str]:
    """Return the near-copy groups of the rows that the artifact was fitted on. Runs that are not among `rows` (stale
    now, or of another device) are looked up in the warehouse."""
    group_of = dict(zip(rows.run_ids.tolist(), rows.group.tolist(), strict=True))
    seen_groups = {group_of[run_id] for run_id in artifact.fitted_run_ids if run_id in group_of}
    others = sorted(artifact.fitted_run_ids - group_of.keys())
    if others:
        with warehouse.connect(folder) as connection:
            seen_rows = connection.execute(
                "SELECT DISTINCT config FROM runs WHERE run_id IN (SELECT unnest(?))", [others]
            ).fetchall()
        for (config,) in seen_rows:
            with contextlib.suppress(UsageError):  # an unknown family has no near-copies among `rows`
                seen_groups.add(group_key(config_of_row(config)))
    return frozenset(seen_groups)


def _read_recorded(
    folder: DataFolder, target: str, estimator: str, cycle: str, source: str | None, device_name: str | None
) -> Promotion | None:
    """Return this cycle's decision if it wrote a model before it was killed."""
    for artifact in versions(folder, target):
        if artifact.meta.get("cycle") == cycle:
            promotion = Promotion(**{**artifact.meta["promotion"], "candidate": artifact.version})
            if (promotion.estimator, promotion.source, promotion.device_name) == (estimator, source, device_name):
                return promotion
    return None


def _after(current: Artifact | None, now: datetime) -> datetime:
    """Return `now`, but later than the current version even if the clock went back: the newest name is current."""
    if current is None:
        return now
    written = datetime.strptime(current.version.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return max(now, written + timedelta(seconds=1))


def compare(current: Evaluation, candidate: Evaluation, seed: int = 0) -> dict[str, Any]:
    """Return the verdict from two evaluations on the same n rows, which both answer, at least one of them with an exact
    label: the candidate is `promoted`, or `kept` out as it is worse.

    The candidate is worse unless the difference of the mean absolute errors (in the target's space, exact labels only)
    is, at its upper 95 % limit, within 5 % of the current one's error or `ALLOWED_AT_LEAST`. It is also worse where
    significantly more labels are above its bound, out-of-memory rows included, and more than the bound promises: a
    tighter bound need not match a wide one that nothing exceeds.
    """
    theirs, ours = figures(current), figures(candidate)
    rows = current.test_rows
    _, highest = limits(errors(candidate) - errors(current), rows.exact.group, seed)
    their_error, our_error = theirs["mean_abs_error"], ours["mean_abs_error"]
    allowed = max(ALLOWED_SHARE * their_error, ALLOWED_AT_LEAST[rows.target.space])
    explanation = (
        f"on {len(rows)} rows held out that neither has seen, the new one's mean error is {our_error:.4f}, the current "
        f"one's {their_error:.4f} ({in_words(rows.target.space)}): with 95 % confidence at "
        f"{f'most {highest:.4f} more' if highest > 0 else f'least {-highest:.4f} less'}, and {allowed:.4f} more "
        "is allowed"
    )
    over = False
    our_share, their_share = ours["above_bound"], theirs["above_bound"]
    if our_share is not None and their_share is not None:
        above = [
            exceeds(rows.label, values_of(evaluation.figures.rows, "upper")) for evaluation in (candidate, current)
        ]
        lowest, _ = limits(above[0].astype(float) - above[1], rows.group, seed)
        over = lowest > 0 and our_share > 1 - LEVEL
        explanation += f"; {our_share:.1%} of labels are above its bound, {their_share:.1%} above the other's"
        if over:
            explanation += f": significantly more, and more than the {1 - LEVEL:.0%} that the bound promises"
    if "own_labels" in ours:
        explanation += f"; these figures are {NOT_INFORMATIVE}: the trace simulated these very labels"
    return {
        "decision": "kept" if over or highest > allowed else "promoted",
        "why": explanation,
        "held_out": len(rows),
        "figures": {"current": theirs, "candidate": ours},
    }


def figures(of: Evaluation) -> dict[str, Any]:
    """Return the figures of n answered rows:

    rows, out_of_memory   n, and the number of out-of-memory rows among them
    mean_abs_error        in the target's space: of the natural logarithm for memory, time and power
    median_rel_error      |point - label| / label; for ratios `median_abs_error` instead
    accuracy              share of rows in their bin
    above_bound           share of labels above the 99 % bound, out-of-memory rows included; None without a bound
    own_labels            true where the estimator itself simulated the labels; else absent

    None where no row has an exact label.
    """
    off = errors(of)
    typical = (
        {"median_abs_error": median(off)}
        if of.test_rows.target.space == "ratio"
        else {"median_rel_error": of.test["median_relative_error"]}
    )
    return {
        "rows": len(of.figures.rows),
        "out_of_memory": of.figures.oom,
        "mean_abs_error": mean(off),
        **typical,
        "accuracy": of.test["accuracy"],
        "above_bound": None if of.figures.bound is None else of.figures.bound.above,
        **({"own_labels": True} if of.figures.own_labels else {}),
    }


def errors(of: Evaluation) -> np.ndarray:
    """Return the absolute errors of the rows with an exact label, (n,), in the target's space."""
    estimate, label = (
        to_space(values_of(of.figures.exact, name), of.test_rows.target.space) for name in ("estimate", "label")
    )
    return np.asarray(np.abs(estimate - label))


def limits(values: np.ndarray, group: np.ndarray, seed: int = 0) -> tuple[float, float]:
    """Return (lower, upper) limit of the mean of (n,) values, each at 95 %: percentiles over draws of whole groups with
    replacement, as errors of near-copies are correlated (cluster bootstrap; Davison and Hinkley 1997, section 3.8)."""
    names, member = np.unique(np.asarray(group).astype(str), return_inverse=True)
    total = np.bincount(member, weights=values, minlength=len(names))
    size = np.bincount(member, minlength=len(names))
    rng = np.random.default_rng(seed)
    means = np.empty(DRAWS)
    for i in range(DRAWS):
        drawn = rng.integers(len(names), size=len(names))
        means[i] = total[drawn].sum() / size[drawn].sum()
    low, high = np.quantile(means, [1 - CONFIDENCE, CONFIDENCE])
    return float(low), float(high)


def in_words(space: str) -> str:
    """Return the unit of `mean_abs_error`."""
    return "of the natural logarithm" if space == "log" else "of the ratio"
