"""Choosing, measuring again and plans: a row or a plan's file makes no task of code that the user did not name."""

import json

import pyarrow as pa
import pytest

from conf.errors import UsageError
from farm.nights.plan import code_names, read_plan, submit_listed
from farm.queue.jobs import Queue
from farm.sampling.coverage import known_runs
from featurize.configs.draws import sample
from featurize.configs.space import parse_space
from featurize.configs.trial import code_problem, config_of_row
from featurize.families import mlp, zoo
from featurize.job.code_names import CodeName
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

DEVICE = "A100-SXM4-40GB"
OWN = {"family": "zoo", "model": "no_such_package_of_mine:build", "inputs": "float32[4]", "batch_size": 8}
PLAIN = mlp.Config(batch_size=4, input_size=8, classes=2, depth=1).to_mapping()


def own_space(**values):
    return parse_space("zoo", {"model": "mine.nets:build", "inputs": "float32[4]", "batch_size": 2, **values})


@pytest.fixture
def folder(tmp_path):
    data_folder = DataFolder.resolve(tmp_path / "a'; echo foo").create()
    writer = RunWriter(data_folder)
    for index, config in enumerate([json.dumps(PLAIN), json.dumps(OWN), "[" * 100_000, "no json"]):
        row = {
            "run_id": f"job-{index:06d}",
            "job_id": "job",
            "task_index": index,
            "attempt": 1,
            "family": "mlp",
            "config": config,
            "config_hash": f"{index}",
            "status": "ok",
            "source": "simulated",
            "device_name": DEVICE,
            "peak_memory_mib": 700.0,
        }
        writer.write(row, pa.table({"t_ms": pa.array([], pa.float64())}))
    return data_folder


def test_choosing_leaves_rows_out_that_cannot_be_built_and_names_them(folder, capsys):
    known = known_runs(folder, DEVICE, source="simulated")
    assert [config.to_mapping() for config in known.configs] == [PLAIN]
    assert known.measured == {"0", "1", "2", "3"}
    error_text = capsys.readouterr().err
    for index in (1, 2, 3):
        assert f"job-{index:06d}" in error_text
    assert "no_such_package_of_mine:build comes from stored data" in error_text


def test_what_the_user_samples_names_code_and_what_a_row_or_a_plan_holds_does_not(folder):
    typed = sample(own_space(), 0, 0)
    assert isinstance(typed.model, CodeName) and code_problem(typed) is None
    row = config_of_row(json.dumps(typed.to_mapping()))
    assert "comes from stored data" in code_problem(row)
    (folder.growth / "plans").mkdir(parents=True)
    plan = [{"why": "stale", "place": None, "config": config} for config in (typed.to_mapping(), OWN, PLAIN)]
    (folder.growth / "plans" / "a.json").write_text(json.dumps(plan))
    space = own_space(model=["mine.nets:build float32[4] {a: 1}", "mine.nets:other float32[4]"], inputs=None)
    assert code_names([space]) == ("mine.nets:build", "mine.nets:other")
    mine, other, plain = (entry.config for entry in read_plan(folder, "growth/plans/a.json", [space]))
    assert code_problem(mine) is None and code_problem(plain) is None
    assert "comes from stored data" in code_problem(other)
    assert "comes from stored data" in code_problem(read_plan(folder, "growth/plans/a.json")[0].config)


def test_a_job_of_configs_that_name_unknown_code_is_refused_whole(folder):
    with Queue.open(folder.queue) as queue:
        with pytest.raises(UsageError, match="comes from stored data"):
            submit_listed(
                folder,
                queue,
                "job",
                [(0, [zoo.Config(**{k: v for k, v in OWN.items() if k != "family"})])],
                None,
                None,
                "uniform",
                0,
            )
        assert not queue.jobs()
