"""The learning step of a growth cycle: fit again, and keep the new model only where it is not worse than the current.

Start reading at `refit`; `learn.evaluation.paired` compares. What is under `models/` is current, so nothing else lands.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from conf.errors import CommandError, UsageError
from learn.targets import Bins, get_target, make_bins

if TYPE_CHECKING:
    from learn.artifacts import Artifact, DataPlace
    from learn.data import Rows
    from learn.estimators import Estimator
    from learn.step_store import StepStore
    from warehouse.folder import DataFolder

HELD_OUT_SHARE = 0.2  # of configurations; another share would show models what judged those before them
LEAST_JUDGES = 30  # rows with an exact label that neither has seen
LEAST_FITTED = 30


@dataclass(frozen=True, kw_only=True)
class Promotion:
    """What came of one target in one cycle.

    decision   first: there was no model before; promoted: the candidate is current now; kept: the old one stays;
               skipped: there was nothing to fit on. `why` says it in a sentence
    current    version that was current before; candidate: that was written, None where none was
    held_out   rows that it was decided on: held out for good, and not seen by the current one either
    figures    `current` and `candidate`: `learn.evaluation.paired.figures`, or None. On the rows that it was decided
               on; where there was nothing to compare, the candidate's on all rows held out
    source, device_name   as they were asked for
    """

    target: str
    estimator: str
    decision: str
    why: str
    current: str | None = None
    candidate: str | None = None
    held_out: int = 0
    figures: Mapping[str, Mapping | None]
    source: str | None = None
    device_name: str | None = None

    def to_mapping(self) -> dict[str, Any]:
        """As JSON has it."""
        return asdict(self)


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
    """Fit a candidate on all usable rows but those held out for good, judge it beside the current model, and write it
    under `models/` if that is what came out. Asked again for a cycle that has promoted one, it says so and does
    nothing more.

    Rows (of `snapshot`, or those of now) and the current model are those of `source` and `device_name`, as in
    `learn.data.load_rows`, `trust` too. Raises `UsageError` for an unknown target or estimator, an estimator
    that cannot do the target, and no data folder; too few rows are no error (`skipped`). `now` is time-zone aware.
    """
    from learn.artifacts import StaleArtifact, newest, require_current
    from learn.data import load_rows
    from learn.estimators import get_estimator, require_target
    from learn.evaluation.evaluate import answered
    from learn.step_store import StepStore
    from learn.suspect_rows import with_suspects
    from warehouse.folder import DataFolder

    now = now or datetime.now(UTC)
    get_target(target)
    kind = get_estimator(estimator)
    require_target(kind, target)
    folder = DataFolder.resolve(data).open()
    if (done := _recorded(folder, target, estimator, cycle, source, device_name)) is not None:
        return done
    promotion_of = partial(Promotion, target=target, estimator=estimator, source=source, device_name=device_name)

    def skipped(why: str) -> Promotion:
        return promotion_of(decision="skipped", why=why, figures={"current": None, "candidate": None})

    progress("reading rows")
    try:
        every = load_rows(folder, target, source=source, device_name=device_name, snapshot=snapshot, trust=trust)
    except CommandError as error:
        return skipped(str(error))
    steps = StepStore(folder)
    rows, held_out, known = _split(every)
    if kind.needs_trace and len(known) >= LEAST_FITTED:
        steps.prepare(rows.cases, progress=lambda done, of: progress(f"tracing {done:,}/{of:,} jobs"))
        every = with_suspects(every, steps)
        rows, held_out, known = _split(every)
    if len(known) < LEAST_FITTED:
        return skipped(
            f"{len(known)} of {len(rows)} rows are there to fit on, {LEAST_FITTED} are needed; the others are held out "
            "to judge by"
        )
    progress("fitting the candidate")
    try:
        fitted = kind(seed=seed).fit(known, steps)
    except CommandError as error:
        return skipped(str(error))

    progress("judging it")
    judges, refused = answered(fitted, rows.subset(held_out), steps)
    candidate = _Candidate(
        estimator, fitted, known, judges, tuple(dict.fromkeys(refused)), _bins(rows), seed, snapshot, steps
    )  # fmt: skip
    if not len(judges.exact):
        reasons = f": {candidate.refusals[0]}" if refused else ""
        return skipped(f"none of the {int(held_out.sum())} rows held out can say how good it is{reasons}")
    current = newest(folder, target, estimator=estimator, device=device_name, source=source or str(rows.source[0]))
    if current is None:
        verdict = _alone("first", "there was no model", candidate)
    else:
        try:
            verdict = _beside(require_current(current), _seen_groups(folder, current, every), candidate, rows, held_out)
        except StaleArtifact:
            no_answer = "the current one was fitted with features of other code and cannot answer any more"
            verdict = _alone("promoted", no_answer, candidate)
    promotion = promotion_of(current=None if current is None else current.version, **verdict)
    if promotion.decision == "kept":
        return promotion
    progress("drawing the report")
    in_doubt = int((every.doubt != "").sum())
    return _write(folder, promotion, candidate, cycle, now=_after(current, now), in_doubt=in_doubt)


def _split(every: Rows) -> tuple[Rows, np.ndarray, Rows]:
    """Return the rows that decide (a label in doubt does not), which of them are held out, and the others."""
    rows = every.trusted
    held_out = is_held_out(rows.group)
    return rows, held_out, rows.subset(~held_out)


def is_held_out(groups) -> np.ndarray:
    """(n,) bool: of near-copy groups by their key, the fifth that no candidate is ever fitted on. It hangs on the key
    alone, so that every night's rows find their side and the rows to judge by only grow."""
    limit = int(HELD_OUT_SHARE * 2**64)
    digests = (hashlib.sha256(f"held out {key}".encode()).digest() for key in groups)
    return np.array([int.from_bytes(digest[:8], "big") < limit for digest in digests], dtype=bool)


@dataclass(frozen=True)
class _Candidate:
    """A fitted model: `known` is what it was fitted on, `judges` the rows held out that it has answers for."""

    name: str
    fitted: Estimator
    known: Rows
    judges: Rows
    refusals: tuple[str, ...]  # why it has none for others
    bins: Bins
    seed: int
    snapshot: str | None
    steps: StepStore  # records of the steps of both


def _alone(decision: str, reason: str, candidate: _Candidate) -> dict[str, Any]:
    """The verdict on one that has nothing to be compared with."""
    from learn.evaluation.evaluate import own_labels
    from learn.evaluation.paired import figures, in_words
    from learn.evaluation.scores import NOT_INFORMATIVE

    judges = candidate.judges
    prediction = candidate.fitted.predict(judges.cases, candidate.steps)
    ours = figures(judges, candidate.bins, prediction)
    explanation = (
        f"its mean error is {ours['mean_abs_error']:.4f} ({in_words(judges.target.space)}), {ours['accuracy']:.0%} are "
        "told their bin"
    )
    if own_labels(candidate.name, judges, prediction.point):
        explanation = f"its errors are {NOT_INFORMATIVE}: the trace simulated these very labels"
    return {
        "decision": decision,
        "why": f"{reason}; this one is fitted on {len(candidate.known)} rows, and on {len(judges)} others held out "
        f"{explanation}",
        "held_out": len(judges),
        "figures": {"current": None, "candidate": _marked(ours, candidate.name, judges, prediction.point)},
    }


def _marked(figures: Mapping[str, Any], estimator: str, judges: Rows, point: np.ndarray) -> dict[str, Any]:
    """The figures, with `own_labels` where they are those of an estimator on labels that it simulated itself."""
    from learn.evaluation.evaluate import own_labels

    return {**figures, "own_labels": True} if own_labels(estimator, judges, point) else dict(figures)


def _beside(
    current: Artifact, seen_groups: frozenset[str], candidate: _Candidate, rows: Rows, held_out: np.ndarray
) -> dict[str, Any]:
    """The verdict on the candidate and the current model, on rows held out that neither has seen."""
    from learn.data import MIN_GROUPS
    from learn.evaluation.evaluate import answered, own_labels
    from learn.evaluation.paired import compare, figures
    from learn.evaluation.scores import NOT_INFORMATIVE

    def unseen(of: Rows) -> np.ndarray:
        return np.array([group not in seen_groups for group in of.group], dtype=bool)

    asked = rows.subset(held_out)
    asked, _ = answered(current.estimator, asked.subset(unseen(asked)), candidate.steps)
    both = np.isin(asked.run_ids.astype(str), candidate.judges.run_ids.astype(str))
    judges = asked.subset(both)
    n, groups = len(judges.exact), len(set(judges.exact.group))

    def kept(why: str) -> dict[str, Any]:
        prediction = candidate.fitted.predict(candidate.judges.cases, candidate.steps)
        ours = figures(candidate.judges, candidate.bins, prediction)
        marked = _marked(ours, candidate.name, candidate.judges, prediction.point)
        return {"decision": "kept", "why": why, "held_out": len(judges),
                "figures": {"current": None, "candidate": marked}}  # fmt: skip

    if not both.all():
        return kept(
            f"the new one has no answer for {int((~both).sum())} of {len(asked)} rows held out that the current one "
            f"answers: {'; '.join(candidate.refusals)}"
        )
    if n < LEAST_JUDGES or groups < MIN_GROUPS:
        return kept(
            f"too few rows to judge by: {n} with a figure, of {groups} different configurations, are held out and not "
            f"seen by the current one either; {LEAST_JUDGES} rows of {MIN_GROUPS} configurations are needed"
        )
    theirs = current.estimator.predict(judges.cases, candidate.steps)
    ours = candidate.fitted.predict(judges.cases, candidate.steps)
    comparison = compare(judges, candidate.bins, theirs, ours, candidate.seed)
    own = own_labels(candidate.name, judges, ours.point)
    caveat = f"; these figures are {NOT_INFORMATIVE}: the trace simulated these very labels" if own else ""
    return {
        "decision": "kept" if comparison.worse else "promoted",
        "why": f"on {len(judges)} rows held out that neither has seen, {comparison.why}{caveat}",
        "held_out": len(judges),
        "figures": {
            "current": _marked(comparison.current, current.meta["estimator"], judges, theirs.point),
            "candidate": _marked(comparison.candidate, candidate.name, judges, ours.point),
        },
    }


def _seen_groups(folder: DataFolder, artifact: Artifact, rows: Rows) -> frozenset[str]:
    """The near-copy groups of the rows that the artifact was fitted on; of those not among `rows` (marked stale since,
    or of another device), by their configs in the warehouse."""
    import warehouse
    from featurize.features import group_key
    from featurize.row_config import config_of_row

    group_of = dict(zip(rows.run_ids.tolist(), rows.group.tolist(), strict=True))
    seen = {group_of[run_id] for run_id in artifact.fitted_run_ids if run_id in group_of}
    others = sorted(artifact.fitted_run_ids - group_of.keys())
    if others:
        connection = warehouse.connect(folder)
        try:
            seen_rows = connection.execute(
                "SELECT DISTINCT config FROM runs WHERE run_id IN (SELECT unnest(?))", [others]
            ).fetchall()
        finally:
            connection.close()
        for (config,) in seen_rows:
            with contextlib.suppress(UsageError):  # of a family that this code does not know: a copy of no row here
                seen.add(group_key(config_of_row(config)))
    return frozenset(seen)


def _bins(rows: Rows) -> Bins:
    return make_bins(rows.target, rows.exact.label, rows.family, ceiling_mib=rows.ceiling_mib)


def _recorded(
    folder: DataFolder, target: str, estimator: str, cycle: str, source: str | None, device_name: str | None
) -> Promotion | None:
    """What this cycle has decided before it was killed, where it wrote a model."""
    from learn.artifacts import versions

    for artifact in versions(folder, target):
        if artifact.meta.get("cycle") == cycle:
            promotion = Promotion(**{**artifact.meta["promotion"], "candidate": artifact.version})
            if (promotion.estimator, promotion.source, promotion.device_name) == (estimator, source, device_name):
                return promotion
    return None


def _after(current: Artifact | None, now: datetime) -> datetime:
    """`now`, but later than the current version even where the clock went back: the newest name is current."""
    if current is None:
        return now
    written = datetime.strptime(current.version.partition("-")[0], "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC)
    return max(now, written + timedelta(seconds=1))


def _write(
    folder: DataFolder, promotion: Promotion, candidate: _Candidate, cycle: str, *, now: datetime, in_doubt: int
) -> Promotion:
    """The candidate as an artifact, like one of `learn.fit`, but never fitted on the rows that judge it."""
    from learn.artifacts import described, save_artifact
    from learn.evaluation.evaluate import judged
    from learn.evaluation.report import write_report
    from learn.fitting import remarks

    known, judges, bins = candidate.known, candidate.judges, candidate.bins
    notes = remarks(type(candidate.fitted), known, bins)
    if candidate.refusals:
        notes.append(f"rows held out without an answer are in no figure: {'; '.join(candidate.refusals)}")
    if in_doubt:
        why = "runs.error says why, or the rows beside them do"
        notes.append(f"{in_doubt} rows are in doubt ({why}): neither fitted on nor judged")
    evaluation = judged(candidate.fitted, known, judges, bins, notes, steps=candidate.steps)
    meta = {
        **described(candidate.name, known, evaluation, bins, candidate.seed, now),
        "warnings": list(evaluation.warnings),
        "fitted": "on the training rows alone; the held-out ones, a fifth of all configurations, never are",
        "snapshot": candidate.snapshot,
        "cycle": cycle,
        "promotion": promotion.to_mapping(),
    }
    meta["rows"] |= {
        "train": len(known),
        "groups": len({*known.group, *judges.group}),
        "status": dict(known.counts),
    }
    report = {
        "cv": [],
        "test": evaluation.test,
        "test_run_ids": judges.run_ids.tolist(),
        "train_run_ids": known.run_ids.tolist(),
        "fitted_on": "train",
    }
    path = save_artifact(
        folder, promotion.target, candidate.fitted, meta, report,
        now=now, extras=lambda home: write_report(home, evaluation, meta),
    )  # fmt: skip
    return replace(promotion, candidate=path.name)
