"""`python -m learn.benchmark` of estimators that learn: who is fitted on which rows; every row has one answer."""

from typing import ClassVar

import numpy as np
import pytest
from learn_rows import make_configs, published_mlp, write_batch, write_published

from conf.errors import UsageError
from learn.benchmark import BenchmarkSettings, benchmark
from learn.estimators import protocol as estimators
from learn.estimators.protocol import Estimator
from learn.job.traced import step_of
from learn.judging.evaluate import classes_of, hold_out
from learn.rows.data import load_rows, make_bins

pytestmark = pytest.mark.usefixtures("fakes")


def write(path, names):
    """Configurations of 900 MiB, 1000 MiB, ... into a published file."""
    return write_published(path, [(name, 900 + 100 * i, "SUCCESSFUL", -1) for i, name in enumerate(names)])


def settings(path, **values):
    return BenchmarkSettings(**{"published": str(path), "workers": 0, **values})


@pytest.fixture(scope="module")
def warehouse_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("learn") / "a'; echo foo"
    write_batch(folder, make_configs(90))
    return folder


def test_of_the_warehouse_holdout_asks_the_rows_that_fit_holds_out(warehouse_folder):
    done = benchmark(
        BenchmarkSettings(
            data=str(warehouse_folder), estimators=("lightgbm", "hundreds"), workers=0, seed=2, split="holdout"
        )
    )
    rows = load_rows(str(warehouse_folder), "memory")
    bins = make_bins(rows.target, rows.exact.label, rows.family, ceiling_mib=rows.ceiling_mib)
    train, test = hold_out(rows, classes_of(rows, bins), 2)
    asked = {row.name for scored in done.scored.values() for row in scored}
    assert asked == set(rows.run_ids[test]) and not asked & set(rows.run_ids[train])
    for family in set(rows.family[test]):
        pair = [f for f in done.figures if f.file == family]
        assert {f.estimator for f in pair} == {"lightgbm", "hundreds"} and pair[0].ok == pair[1].ok
    fitted = estimators.make_estimator("lightgbm", 2).fit(rows.subset(train)).predict(rows.subset(test).cases)
    np.testing.assert_allclose([answers_of(done, "lightgbm")[name] for name in rows.run_ids[test]], fitted.point)


def answers_of(done, estimator):
    return {row.name: row.estimate for (_, name), rows in done.scored.items() if name == estimator for row in rows}


def test_by_cross_validation_every_row_has_one_answer(warehouse_folder):
    done = benchmark(BenchmarkSettings(data=str(warehouse_folder), estimators=("lightgbm", "hundreds"), workers=0))
    asked = [row.name for (_, name), rows in done.scored.items() if name == "lightgbm" for row in rows]
    assert sorted(asked) == sorted(load_rows(str(warehouse_folder), "memory").run_ids)
    own = next(f for f in done.figures if (f.file, f.estimator) == ("mlp", "lightgbm"))
    assert own.fits == 3 and own.fit_seconds > 0 and own.median_seconds > 0 and own.constant is None
    assert 0.5 < own.bound.coverage <= 1 and own.bound.above == pytest.approx(1 - own.bound.coverage)
    assert list(own.reliability)[-1] == "0.99" and set(own.classes) == {"published", "ours"}
    free = next(f for f in done.figures if (f.file, f.estimator) == ("mlp", "hundreds"))
    assert free.fits == 0 and free.bound is None and free.constant is not None and set(free.classes_shifted)


def test_left_out_is_answered_from_the_others_only(warehouse_folder):
    chosen = BenchmarkSettings(
        data=str(warehouse_folder), estimators=("lightgbm",), workers=0, split="leave_one_out", by="family"
    )
    done = benchmark(chosen)
    rows = load_rows(str(warehouse_folder), "memory")
    train = rows.subset(rows.family == "mlp")
    asked = rows.subset(rows.family == "cnn")
    fitted = estimators.make_estimator("lightgbm", 0).fit(train).predict(asked.cases)
    given = answers_of(done, "lightgbm")
    np.testing.assert_allclose([given[name] for name in asked.run_ids], fitted.point)
    with pytest.raises(UsageError, match="all rows are of device a100-sxm4-40gb; it takes two or more"):
        benchmark(BenchmarkSettings(**{**vars(chosen), "by": "device"}))


def test_of_several_devices_each_is_left_out_in_turn(tmp_path):
    configs = make_configs(60)
    for device, half in (("A100-SXM4-40GB", configs[:30]), ("H200-SXM-141GB", configs[30:])):
        write_batch(tmp_path, half, statuses=["ok"] * 30, job=device, device=device)
    chosen = {"data": str(tmp_path), "estimators": ("lightgbm",), "workers": 0}
    done = benchmark(BenchmarkSettings(**chosen, split="leave_one_out", by="device"))
    given = answers_of(done, "lightgbm")
    assert len(given) == 60 and None not in given.values()
    assert {row.group for rows in done.scored.values() for row in rows} == {"a100-sxm4-40gb", "h200-sxm-141gb"}


def test_of_another_target_only_those_are_asked_that_estimate_it(warehouse_folder):
    done = benchmark(
        BenchmarkSettings(
            data=str(warehouse_folder), target="drama", rows=15, workers=0, estimators=("trace", "lightgbm")
        )
    )
    assert {f.estimator for f in done.figures} == {"lightgbm", "trace"}
    assert done.card_mib is None and not done.relative and all(f.ok <= 15 for f in done.figures)
    assert {f.estimator for f in done.published} == {"GPUMemNet"}
    assert {"trace", "lightgbm"} <= set(BenchmarkSettings(target="drama").names)
    assert "horus" not in BenchmarkSettings(target="drama").names
    with pytest.raises(UsageError, match="horus estimates target=memory only"):
        BenchmarkSettings(data=str(warehouse_folder), target="drama", estimators=("horus",))


def published_folder(tmp_path):
    """50 MLP rows of 10 networks in `some.csv`, two named models in `known.csv`."""
    names = [published_mlp(batch, depth=depth) for depth in range(1, 11) for batch in (8, 16, 32, 64, 128)]
    write(tmp_path / "some.csv", names)
    (tmp_path / "known.csv").write_text("model,batch_size,actual_mib,horus_mib\nlenet,2,1000,1500\nlenet,4,2000,2500\n")
    return tmp_path


class Watcher(Estimator):
    """Answers 500 MiB, below a bound of 1 GB, and notes what it was fitted on."""

    name = "watcher"
    targets = None
    seen: ClassVar[list] = []

    def __init__(self, seed=0):
        pass

    def fit(self, rows, steps=None):
        Watcher.seen.append(rows)
        return self

    def predict(self, cases, steps=None):
        centre = np.full(len(cases), np.log(500.0))
        return estimators.ResidualPrediction(centre, np.linspace(0, np.log(2), 200), "log", ("it only watches",))


@pytest.fixture
def watcher(monkeypatch):
    monkeypatch.setitem(estimators.ESTIMATORS, "watcher", f"{__name__}:Watcher")
    Watcher.seen.clear()
    return Watcher.seen


def test_named_models_are_never_fitted_on(tmp_path, watcher):
    done = benchmark(settings(published_folder(tmp_path), estimators=("watcher",)))
    assert len(watcher) == 4, "three folds, and one fit for what is never fitted on"
    for rows in watcher:
        assert set(rows.family) == {"mlp"} and all(name.startswith("some:") for name in rows.run_ids)
    assert len(watcher[-1]) == 50
    given = answers_of(done, "watcher")
    assert len(given) == 52 and list(given.values()) == pytest.approx([500] * 52)
    assert any("known: never fitted on" in note for note in done.notes) and "watcher: it only watches" in done.notes
    figures = next(f for f in done.figures if (f.file, f.estimator) == ("known", "watcher"))
    assert figures.raw.mean == pytest.approx((0.5 + 0.75) / 2) and figures.bound.coverage == 0.0
    assert figures.fit_right_bound == 1.0 and figures.reliability["0.99"] == 0.0


def test_asked_alone_they_are_answered_by_a_fit_on_the_folders_other_files(tmp_path, watcher):
    folder = published_folder(tmp_path)
    done = benchmark(settings(folder, files=("known",), estimators=("watcher",)))
    assert [len(rows) for rows in watcher] == [50] and {f.file for f in done.figures} == {"known"}
    with pytest.raises(UsageError, match="no file here that an estimator may be fitted on; name the folder"):
        benchmark(settings(folder / "known.csv", estimators=("watcher",)))


def test_an_estimator_that_reads_configs_only_refuses_modules_by_row(tmp_path):
    (tmp_path / "known.csv").write_text("model,batch_size,actual_mib\nlenet,2,1000\n")
    write(tmp_path / "some.csv", [published_mlp(batch) for batch in range(8, 60, 4)])
    with pytest.raises(UsageError, match="near-copies of 1 configurations; folds=3 takes at least 3"):
        benchmark(settings(tmp_path, estimators=("lightgbm",)))
    shapes = [published_mlp(batch, depth=depth) for batch in (8, 16, 32, 64) for depth in range(1, 9)]
    write(tmp_path / "some.csv", [*shapes, published_mlp(9, topology="spiral")])
    known, some = benchmark(settings(tmp_path, estimators=("lightgbm",))).figures
    assert known.answered_ok == 0 and "trial configs only" in next(iter(known.refusals))
    assert (some.ok, some.answered_ok) == (33, 32) and sum(some.refusals.values()) == 1


def test_a_row_is_traced_once_for_all_estimators_and_figures_come_as_they_are_done(tmp_path, monkeypatch):
    traced = []

    def counted(job, *args, **options):
        traced.append(job)
        return step_of(job, *args, **options)

    monkeypatch.setattr("learn.job.traced.step_of", counted)
    monkeypatch.setattr("learn.peers.base.step_of", counted)
    monkeypatch.setattr("learn.commands.benchmark_rows.SLOW", ("hundreds",))
    path = write(tmp_path / "some.csv", [published_mlp(8 * (i + 1), depth=1 + i) for i in range(18)])
    shown = []
    chosen = settings(path, estimators=("hundreds", "trace", "hybrid"), data=str(tmp_path / "data"))
    done = benchmark(chosen, finished=shown.extend)
    assert len(traced) == 18 and all(figures.answered_ok == 18 for figures in done.figures)
    assert [figures.estimator for figures in done.figures] == ["hundreds", "trace", "hybrid"]
    assert [figures.estimator for figures in shown] == ["hybrid", "trace", "hundreds"]
    assert {figures.estimator: figures for figures in shown} == {figures.estimator: figures for figures in done.figures}
    alone = benchmark(settings(path, estimators=("trace",)))
    assert answers_of(alone, "trace") == answers_of(done, "trace") and len(traced) == 36
