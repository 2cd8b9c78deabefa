"""Rows of models that cannot be imported here cost themselves alone: nights, fits, benchmarks and estimates go on.

Each command says in one line how many such rows there are; features that were stored where the module was are used.
"""

import json
import sys

import pyarrow as pa
import pytest

from featurize.configs.trial import config_of_user
from featurize.families import zoo
from learn.job.training_job import Case
from learn.rows.step_store import StepStore
from tests.learn.learn_rows import make_configs, runs_of, write_batch
from warehouse.files.writer import RunWriter

ROWS = 5
NETS = "from torch import nn\ndef build(): return nn.Linear(4, 2)\n"
MODULE = "own_models_elsewhere"


def own(batch_size):
    return {"family": "zoo", "model": f"{MODULE}:build", "inputs": "float32[4]", "batch_size": batch_size}


@pytest.fixture
def data_key(data):
    """The argument that names the data folder."""
    return f"data={json.dumps(str(data.root))}"


@pytest.fixture
def data(folder, tmp_path, monkeypatch):
    """60 ordinary rows, and five of a model whose module is not here."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    write_batch(folder, make_configs(60))
    writer = RunWriter(folder)
    labelled = runs_of(make_configs(ROWS), job="own", statuses=["ok"] * ROWS)
    for index, run in enumerate(labelled):
        of_zoo = {"family": "zoo", "config": json.dumps(own(2**index)), "config_hash": f"own-{index}"}
        writer.write(run | of_zoo, pa.table({"t_ms": pa.array([], pa.float64())}))
    return folder


NIGHT = (
    "families=[mlp]",
    "pool=30",
    "n=2",
    "device=simulated",
    "cluster=inline",
    "canaries=skip",
    "learn.targets=[memory]",
    "learn.estimator=lightgbm",
)


def test_a_dry_run_names_the_rows_that_are_left_out(data_key, outcome):
    code, _, err = outcome("grow", *NIGHT, "dry_run=true", data_key)
    assert code == 0 and f"choosing: {ROWS} rows" in err and MODULE in err


@pytest.mark.slow
def test_a_night_is_planned_measured_and_learnt_from(data_key, outcome):
    code, out, err = outcome("grow", *NIGHT, data_key)
    assert code == 0 and "done: 2 runs were simulated (ok 2); models: memory first" in " ".join(out.split()), err
    (line,) = [line for line in err.splitlines() if "choosing: " in line and "rows" in line]
    assert f"{ROWS} rows" in line and MODULE in line


def test_an_estimate_of_such_a_row_takes_the_features_that_are_stored(
    data, data_key, tmp_path, refused, answer, monkeypatch
):
    assert f"trust=[{MODULE}]" in refused("estimate", "run=own-000000", data_key)
    (tmp_path / f"{MODULE}.py").write_text(NETS)
    with monkeypatch.context() as importable:
        importable.syspath_prepend(str(tmp_path))
        StepStore(data).prepare([Case(config_of_user(own(1)))], workers=0)
    sys.modules.pop(MODULE)
    zoo._read.cache_clear()
    estimate = answer("estimate", "run=own-000000", data_key)
    assert estimate["peak_memory_mib"] > 0 and any("comes from stored data" in text for text in estimate["warnings"])
