"""Models that a refit keeps or leaves, on folders of real runs: better, worse, too few to tell, killed, outdated."""

import json
import shutil
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import numpy as np
import pytest

from conf.errors import UsageError
from featurize.configs.features import group_key
from learn import FitSettings, fit
from learn.commands.fit import compare as compare_evaluations, is_held_out, limits, refit
from learn.estimators.protocol import ResidualPrediction
from learn.fitting.artifacts import newest, versions
from learn.judging.evaluate import judged
from learn.rows.data import make_bins
from tests.learn.learn_rows import labels_of, make_configs, make_rows, restamp, write_batch
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import take_snapshot

NIGHT = datetime(2026, 11, 20, 2, tzinfo=UTC)
POOL = make_configs(500)
FIRST_KEYS = {group_key(config) for config in POOL[:90]}
HELD_OUT = [config for config in POOL if is_held_out([group_key(config)])[0]]
SEEN = [config for config in HELD_OUT if config in POOL[:90]]
FRESH = [config for config in HELD_OUT if group_key(config) not in FIRST_KEYS]


def night(data, n, target="memory", estimator="lightgbm", **changes):
    """The learning step of the n-th night."""
    return refit(data, target, estimator, cycle=f"2026-11-{20 + n}", now=NIGHT + timedelta(days=n), **changes)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    data = tmp_path_factory.mktemp("base")
    write_batch(data, POOL[:90], job="n0", statuses=["ok"] * 90)
    return data, fit(FitSettings(target="smact", estimator="lightgbm", data=str(data)), now=NIGHT).path


@pytest.fixture
def fitted(base, data):
    """(folder, artifact's path): 90 rows and what `learn.fit` made of them, which has seen them all."""
    shutil.copytree(base[0], data)
    return data, data / base[1].relative_to(base[0])


@pytest.fixture(scope="module")
def grown(tmp_path_factory):
    """(folder, three nights): 80 rows, 140 more, and none."""
    data = tmp_path_factory.mktemp("grown")
    write_batch(data, POOL[:80], job="n0")
    nights = [night(data, 0)]
    write_batch(data, POOL[80:220], job="n1")
    return data, [*nights, night(data, 1), night(data, 2)]


def test_the_first_model_is_kept_and_more_rows_or_the_same_promote_the_next(grown):
    data, (first, second, third) = grown
    assert first.decision == "first" and first.current is None
    assert first.figures["current"] is None and first.held_out == first.figures["candidate"]["rows"] > 10
    assert versions(data, "memory")[0].version == first.candidate
    assert second.decision == "promoted" and second.current == first.candidate
    before, now = second.figures["current"], second.figures["candidate"]
    assert now["mean_abs_error"] < before["mean_abs_error"] and now["rows"] == before["rows"] == second.held_out
    assert f"on {second.held_out} rows held out that neither has seen" in second.why and "95 % confidence" in second.why
    assert third.decision == "promoted" and third.figures["current"] == third.figures["candidate"]
    assert newest(data, "memory", estimator="lightgbm").version == third.candidate
    assert third.figures["candidate"] == second.figures["candidate"], "comparable from night to night"


def test_a_cycle_that_was_killed_after_writing_neither_writes_again_nor_judges_itself(grown):
    data, (first, second, third) = grown
    before = [artifact.version for artifact in versions(data, "memory")]
    assert night(data, 2) == third and night(data, 1) == second and night(data, 0) == first
    assert [artifact.version for artifact in versions(data, "memory")] == before


def test_too_few_rows_that_the_current_model_has_not_seen(fitted):
    data, old = fitted
    others = [config for config in POOL[-20:] if config not in HELD_OUT]
    write_batch(data, [*FRESH[:12], *others[-5:]], job="n1", statuses=["ok"] * 17)
    found = night(data, 1, "smact")
    assert found.decision == "kept" and found.current == old.name and found.held_out == 12
    assert "12 with a figure, of 12 different configurations" in found.why and "30 rows of 10" in found.why
    assert found.figures["current"] is None and found.figures["candidate"]["rows"] > 12


def test_what_a_fit_saw_judges_nothing_and_neither_do_near_copies_of_it(fitted):
    data, old = fitted
    copies = [type(c)(**{**vars(c), "batch_size": c.batch_size + 1}) for c in SEEN] * 3
    assert len(copies) > 40
    write_batch(data, copies, job="n1", statuses=["ok"] * len(copies))
    assert night(data, 1, "smact").held_out == 0
    write_batch(data, FRESH[:40], job="n2", statuses=["ok"] * 40)
    found = night(data, 2, "smact")
    assert found.held_out == found.figures["current"]["rows"] == 40 and found.current == old.name


def test_a_model_of_other_features_is_replaced_as_it_cannot_answer(fitted):
    data, old = fitted
    restamp(old, feature_version="0ld")  # as if other code had fitted it
    later = old.rename(old.with_name(f"20991231{old.name[8:]}"))  # the clock has gone back since
    found = night(data, 1, "smact")
    assert found.decision == "promoted" and found.current == later.name
    assert "features of other code and cannot answer" in found.why
    assert newest(data, "smact").version == found.candidate


def test_nothing_to_fit_on_is_skipped_with_the_reason(data):
    write_batch(data, POOL[:20])
    found = night(data, 0)
    assert found.decision == "skipped" and "needs at least 30 usable rows, and there are 20" in found.why
    assert found.figures == {"current": None, "candidate": None} and not versions(data, "memory")
    write_batch(data, POOL[20:32], job="more")
    found = night(data, 0)
    assert found.decision == "skipped" and "rows are there to fit on, 30 are needed" in found.why


@pytest.mark.parametrize(
    ("target", "estimator", "message"),
    [
        ("smact", "dnnmem", "estimates target=memory only, got target=smact"),
        ("mem", "lightgbm", "unknown target 'mem'"),
        ("memory", "xgb", "unknown estimator"),
        ("memory", "lightgbm", "does not exist"),
    ],
)
def test_users_mistakes_are_said_before_anything_is_read(data, target, estimator, message):
    with pytest.raises(UsageError, match=message):
        night(data, 0, target, estimator)


def test_the_share_held_out_is_a_fifth_and_never_changes():
    keys = [f"cnn-{i:016x}" for i in range(5000)]
    held_out = is_held_out(keys)
    assert 0.18 < held_out.mean() < 0.22
    assert np.array_equal(is_held_out(keys[:100]), held_out[:100])
    assert np.flatnonzero(held_out)[:4].tolist() == [6, 19, 32, 33]


# ----- the comparison itself, on errors that are known

CONFIGS = make_configs(60, seed=3)
ROWS = make_rows("memory", CONFIGS, labels_of(CONFIGS)["peak_memory_mib"])
BINS = make_bins(ROWS.target, ROWS.label, ROWS.family)


def compare(rows, bins, *predictions):
    """The comparison of two predictions: whether the second is worse, the figures of both, and the reason."""
    verdict = compare_evaluations(*(judged(one, rows, bins, "hybrid", rows) for one in predictions))
    return SimpleNamespace(worse=verdict["decision"] == "kept", why=verdict["why"], **verdict["figures"])


def off_by(size, bound=1.0, rows=ROWS):
    """A prediction whose errors are all of that size, up and down, with a bound at exp(bound) times the point."""
    sign = np.where(np.arange(len(rows)) % 2, 1.0, -1.0)
    return ResidualPrediction(np.log(rows.label) + sign * size, np.array([-bound, bound]), "log")


@pytest.mark.parametrize(
    ("current", "candidate", "worse"),
    [(0.10, 0.10, False), (0.10, 0.02, False), (0.10, 0.104, False), (0.10, 0.11, True), (0.001, 0.004, False)],
)
def test_not_worse_is_within_5_percent_or_half_a_percent_of_memory(current, candidate, worse):
    found = compare(ROWS, BINS, off_by(current), off_by(candidate))
    assert found.worse is worse
    assert found.candidate["mean_abs_error"] == pytest.approx(candidate)


def test_better_in_the_mean_by_chance_is_not_enough():
    wild = np.where(np.arange(60) % 4 == 0, 0.36, 0.0)  # 0.09 in the mean, of a quarter of the rows
    lucky = ResidualPrediction(np.log(ROWS.label) + wild, np.array([1.0]), "log")
    found = compare(ROWS, BINS, off_by(0.10), lucky)
    assert found.worse and found.candidate["mean_abs_error"] < found.current["mean_abs_error"]


def test_a_bound_that_is_exceeded_more_often_keeps_the_candidate_behind():
    tight = compare(ROWS, BINS, off_by(0.10), off_by(0.08, bound=0.05))
    assert (
        tight.worse and "50.0% of labels are above its bound, 0.0% above the other's: significantly more" in tight.why
    )
    assert not compare(ROWS, BINS, off_by(0.10, bound=0.05), off_by(0.08, bound=0.05)).worse


def test_copies_of_rows_that_no_longer_count_are_still_seen(fitted):
    data, old = fitted
    write_batch(data, FRESH[:40], job="away", source="measured", statuses=["ok"] * 40)
    report = json.loads((old / "report.json").read_text())  # as if it had been fitted on those as well
    away = [f"away-{i:06d}" for i in range(20)]
    (old / "report.json").write_text(json.dumps(report | {"train_run_ids": report["train_run_ids"] + away}))
    restamp(old)
    write_batch(data, FRESH[:40], job="n1", statuses=["ok"] * 40)
    assert night(data, 1, "smact", source="simulated").held_out == 20


@pytest.mark.slow
def test_a_refit_is_of_its_snapshot_and_of_its_gpu_model(fitted):
    data, old = fitted
    take_snapshot(DataFolder.resolve(data), "2026-11-21")
    write_batch(data, FRESH[:40], job="n1", statuses=["ok"] * 40, device="H100-SXM5-80GB")
    assert night(data, 1, "smact", snapshot="2026-11-21").held_out == 0
    write_batch(data, POOL[:60], job="h", statuses=["ok"] * 60, device="H100-SXM5-80GB")
    assert night(data, 2, "smact", device_name="H100-SXM5-80GB").decision == "first"
    assert night(data, 3, "smact", device_name="A100-SXM4-40GB").current == old.name


def test_rows_that_only_the_current_model_answers_keep_the_candidate_behind(fitted, monkeypatch):
    from learn.estimators import trees

    data, _ = fitted
    write_batch(data, FRESH[:40], job="n1", statuses=["ok"] * 40)
    predict = trees.TabularEstimator.predict

    def forgetful(self, cases, steps=None):
        """Has no answer for large batches, once it was fitted on more than the 90 rows."""
        answer = predict(self, cases, steps)
        large = {i: "too large" for i, case in enumerate(cases) if case.config.batch_size > 64}
        return answer if len(self._residuals) == 90 else replace(answer, refusals=large)

    monkeypatch.setattr(trees.TabularEstimator, "predict", forgetful)
    found = night(data, 1, "smact")
    assert found.decision == "kept" and "has no answer for" in found.why and "too large" in found.why


def test_near_copies_count_as_one_witness():
    values = np.repeat([0.0, 1.0] * 10, 10)
    alone, together = limits(values, np.arange(200)), limits(values, np.arange(200) // 10)
    assert together[1] - together[0] > 2 * (alone[1] - alone[0])
    assert limits(values, np.arange(200)) == alone
