"""Choosing what to measure next: what a night gets, and what it never gets again."""

import json
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from conf.errors import UsageError
from farm.nights.plan import code_names, read_plan, submit_listed
from farm.queue.jobs import Queue
from farm.sampling.forecast import Forecaster
from farm.sampling.selection import (
    POLICIES,
    CandidatePool,
    Known,
    candidates,
    chance_to_fit,
    choose,
    known_runs,
    merge_pools,
)
from featurize.configs.space import parse_space, sample
from featurize.configs.trial import canonical_json, code_problem, config_hash, config_of_row
from featurize.device.device_spec import load_device
from featurize.families import get_family, mlp
from featurize.job.code_names import CodeName
from tests.warehouse.warehouse_rows import run_row
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import TELEMETRY_SCHEMA

A100 = load_device("A100-SXM4-40GB")
NO_TELEMETRY = TELEMETRY_SCHEMA.empty_table()
FORECASTER = Forecaster(device=A100, workers=0)
MLP = parse_space(
    "mlp",
    {
        "input_size": {"low": 16, "high": 4096},
        "classes": {"low": 2, "high": 64},
        "depth": {"low": 2, "high": 8},
        "topology": ["pyramid", "uniform"],
        "activation": "relu",
        "batch_size": {"low": 4, "high": 1024},
        "batch_norm": [False, True],
        "dropout": 0.1,
    },
)


@pytest.fixture(scope="module")
def pool():
    return candidates(MLP, "coverage", 0, 0, 300)


def known_of(configs, memory_mib, *, out=None, seconds=None):
    n = len(configs)
    return Known(
        frozenset(map(config_hash, configs)),
        tuple(configs),
        {"memory": np.asarray(memory_mib, dtype=float)},
        np.zeros(n, dtype=bool) if out is None else np.asarray(out, dtype=bool),
        np.full(n, np.nan) if seconds is None else np.asarray(seconds, dtype=float),
    )


def measured(configs):
    """Rows whose memory is the forecast's own, with wall times."""
    figures = FORECASTER.look(list(configs)).figures["memory"]
    return known_of(configs, figures, seconds=[30.0] * len(figures))


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_measured_twice_and_the_same_call_makes_the_same_choice(pool, policy):
    known = measured(pool.configs[:40])
    twice = CandidatePool(pool.configs[:100] * 2, pool.hashes[:100] * 2, pool.indices[:100] * 2, pool.next_index)
    choice = choose(policy, twice, known, 60, FORECASTER, seed=3)
    assert choice == choose(policy, twice, known, 60, FORECASTER, seed=3)
    chosen = [config_hash(one.config) for one in choice.chosen]
    assert len(chosen) == len(set(chosen)) == 60
    assert not set(chosen) & known.measured
    assert choice.measured >= 40


NETS = """
from torch import nn

def good(width=4): return nn.Linear(4, width)
def bad(width=4): raise RuntimeError("boom")
"""


@pytest.fixture
def own_models(tmp_path, monkeypatch):
    """Candidates of models of one's own: `own_models("good", "bad")`."""
    (tmp_path / "selection_test_nets.py").write_text(NETS)
    monkeypatch.syspath_prepend(str(tmp_path))

    def of(*factories):
        models = [f"selection_test_nets:{name}" for name in factories]
        values = {"model": models, "inputs": "float32[4]", "batch_size": {"low": 1, "high": 64}}
        return candidates(parse_space("zoo", values), "stratified", 0, 0, 12)

    yield of
    get_family("zoo")._read.cache_clear()
    sys.modules.pop("selection_test_nets", None)


@pytest.mark.parametrize("policy", ["stratified", "coverage"])
def test_what_cannot_be_built_costs_its_own_candidates_and_is_counted(pool, own_models, policy):
    both = merge_pools(
        [CandidatePool(pool.configs[:12], pool.hashes[:12], pool.indices[:12], {"mlp": 12}), own_models("good", "bad")]
    )
    choice = choose(policy, both, Known.nothing(), 15, FORECASTER)
    models = Counter(getattr(one.config, "model", "mlp") for one in choice.chosen)
    assert set(models) == {"mlp", "selection_test_nets:good"}
    (note,) = [note for note in choice.notes if "cannot be built" in note]
    assert note.endswith(
        "whose model cannot be built: zoo: selection_test_nets:bad does not run on float32[4]: RuntimeError: boom"
    )
    taken = [one.index for one in choice.chosen if one.config.family == "zoo"]
    assert choice.next_index["zoo"] > max(taken) > len(taken), "the sequence goes on behind those that it left out"


def test_coverage_fills_the_bins_that_have_few_rows(pool):
    known = measured(pool.configs[:50])

    def cells(policy):
        return sum(map(len, choose(policy, pool, known, 40, FORECASTER).gained.values()))

    assert cells("coverage") > 1.1 * cells("stratified")


def test_active_asks_where_the_known_rows_disagree_with_the_rough_figures(pool):
    """Labels that follow the rough figures, but for one topology where they are erratic: that is what is asked."""
    figures = FORECASTER.look(pool.configs).figures["memory"]
    random = np.random.default_rng(0)
    erratic = np.array([config.topology == "uniform" and config.batch_norm for config in pool.configs])
    labels = figures * np.where(erratic, np.exp(random.normal(0, 0.7, len(figures))), 1.0)
    known = known_of(pool.configs[:100], labels[:100])
    choice = choose("active", pool, known, 40, FORECASTER)
    share = np.mean([one.config.topology == "uniform" and one.config.batch_norm for one in choice.chosen])
    assert share > 1.5 * erratic[100:].mean()


def test_what_will_probably_not_fit_is_rarely_worth_a_run(pool):
    chance = chance_to_fit(np.array([100.0, 1000.0, 1e5, np.inf]), np.zeros(4), capacity_mib=1000.0)
    assert chance == pytest.approx([1.0, 0.5, 0.0, 0.0], abs=1e-6)
    figures = FORECASTER.look(pool.configs).figures["memory"]
    capacity = float(np.quantile(figures, 0.5))
    small = replace(FORECASTER, device=replace(A100, memory_mib=capacity))
    known = known_of(pool.configs[:60], figures[:60], out=figures[:60] >= capacity)
    choice = choose("active", pool, known, 60, small)
    assert np.mean([one.figures["memory"] > 1.1 * capacity for one in choice.chosen]) < 0.15


def test_what_the_warehouse_has_is_known_by_device_source_and_environment(folder, pool):
    writer = RunWriter(folder)
    known = {
        "family": "mlp",
        "source": "measured",
        "device_name": "NVIDIA A100-SXM4-40GB",
        "torch_version": "2.13.0",
        "quality": "trusted",
        "wall_s": 12.0,
        "peak_memory_mib": 900.0,
    }
    changes = (
        {"device_name": "Tesla V100"},
        {"torch_version": "2.4.1"},
        {"quality": "untrusted"},
        {},
        {"status": "oom", "oom_kind": "device", "peak_memory_mib": None},
        {"status": "crashed", "peak_memory_mib": None},
    )
    for index, (config, changed) in enumerate(zip(pool.configs, changes, strict=False)):
        text = canonical_json(config.to_mapping())
        row = run_row(index, **known, config=text, config_hash=config_hash(config)) | changed
        writer.write(row, NO_TELEMETRY)
        beside = {"run_id": f"{row['run_id']}-with-1", "task_index": None, "group_id": row["run_id"]}
        writer.write({**row, **beside, "status": "ok", "peak_memory_mib": 5.0}, NO_TELEMETRY)
    known = known_runs(folder.root, "A100-SXM4-40GB", environment={"torch_version": "2.13.0"})
    assert known.measured == {pool.hashes[i] for i in (2, 3, 4, 5)}
    assert known.configs == tuple(pool.configs[i] for i in (1, 3, 4))
    assert known.out_of_memory.tolist() == [False, False, True]
    assert not known_runs(folder.root, "A100-SXM4-40GB", source="simulated").measured


def test_a_pool_of_which_all_is_measured_is_refused(pool):
    with pytest.raises(UsageError, match="measured already"):
        choose("active", pool, measured(pool.configs), 5, FORECASTER)


# A row or a plan's file makes no task of code that the user did not name


DEVICE = "A100-SXM4-40GB"
OWN = {"family": "zoo", "model": "no_such_package_of_mine:build", "inputs": "float32[4]", "batch_size": 8}
PLAIN = mlp.Config(batch_size=4, input_size=8, classes=2, depth=1).to_mapping()


def own_space(**values):
    return parse_space("zoo", {"model": "mine.nets:build", "inputs": "float32[4]", "batch_size": 2, **values})


@pytest.fixture
def stored(folder):
    """A data folder whose rows hold a plain config, one that names code, and what is none."""
    writer = RunWriter(folder)
    for index, config in enumerate([json.dumps(PLAIN), json.dumps(OWN), "[" * 100_000, "no json"]):
        about = {"family": "mlp", "device_name": DEVICE, "peak_memory_mib": 700.0}
        writer.write(run_row(index, **about, config=config, config_hash=f"{index}"), NO_TELEMETRY)
    return folder


def test_choosing_leaves_rows_out_that_cannot_be_built_and_names_them(stored):
    known = known_runs(stored, DEVICE, source="simulated")
    assert [config.to_mapping() for config in known.configs] == [PLAIN]
    assert known.measured == {"0", "1", "2", "3"}
    left_out = "\n".join(known.left_out)
    named = ("J-000001", "J-000002", "J-000003", "no_such_package_of_mine:build comes from stored data")
    assert [text for text in named if text not in left_out] == []


def test_what_the_user_samples_names_code_and_what_a_row_or_a_plan_holds_does_not(stored):
    typed = sample(own_space(), 0, 0)
    assert isinstance(typed.model, CodeName) and code_problem(typed) is None
    assert "comes from stored data" in code_problem(config_of_row(json.dumps(typed.to_mapping())))
    (stored.growth / "plans").mkdir(parents=True)
    plan = [{"place": None, "config": config} for config in (typed.to_mapping(), OWN, PLAIN)]
    (stored.growth / "plans" / "a.json").write_text(json.dumps(plan))
    space = own_space(model=["mine.nets:build float32[4] {a: 1}", "mine.nets:other float32[4]"], inputs=None)
    assert code_names([space]) == ("mine.nets:build", "mine.nets:other")
    mine, other, plain = (entry.config for entry in read_plan(stored, "growth/plans/a.json", [space]))
    assert code_problem(mine) is None and code_problem(plain) is None
    assert "comes from stored data" in code_problem(other)
    assert "comes from stored data" in code_problem(read_plan(stored, "growth/plans/a.json")[0].config)


def test_a_job_of_configs_that_name_unknown_code_is_refused_whole(stored):
    listed = [(0, [config_of_row(json.dumps(OWN))])]
    with Queue.open(stored.queue) as queue:
        with pytest.raises(UsageError, match="comes from stored data"):
            submit_listed(stored, queue, "job", listed, None, None, "uniform", 0)
        assert not queue.jobs()
