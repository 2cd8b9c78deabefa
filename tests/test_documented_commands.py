"""Every command line of the documents and of `--help`: all compose, and what is cheap and safe is run, small."""

import os
import shutil

import pytest

from tests.documented_commands import JSON, ROOT, documented_commands
from tests.learn.conftest import few_trees as few_trees
from tests.learn.learn_rows import make_configs, write_batch
from tests.surroundings import run_module
from warehouse.files.folder import DataFolder

COMMANDS = documented_commands()
SMALL = {  # settings that make a documented command small, and keep what it writes in the sandbox
    "farm.submit": ("n=2", "detach=true"),
    "farm.grow": ("n=2", "pool=30", "dry_run=true", "device=simulated"),
    "farm.work": ("cluster=inline",),
    "farm.replay": ("n=5", "seeds=[0]"),
    "learn.fit": ("estimator=lightgbm",),
    "learn.benchmark": ("estimators=[dnnmem]", "rows=5", "workers=0"),
}
NOT_RUN = {  # part of a command line -> why it is composed and no more
    "path=timm_train_step_time.csv": "a published file, which does not come along",
    "path=kernel_times.parquet": "a published file, which does not come along",
    "path=allreduce_times.csv": "a published file, which does not come along",
    "trace=cluster_job_log.json": "a published file; tests/farm/test_cluster_replay.py reads one like it",
    "host_load": "the sensor of a walk-through, which is not there",
    "optimizer=adamax": "the optimizer of a walk-through; tests/test_contributing.py runs it",
    "-- python train.py": "needs a training script; tests/learn/test_script_kinds.py runs some",
    "-- torchrun": "needs a training script; tests/learn/test_script_ranks.py runs some",
    "-- accelerate launch": "needs a training script; tests/learn/test_script_ranks.py runs some",
    "deepspeed --": "needs a script under DeepSpeed; tests/learn/test_script_deepspeed.py runs some",
    "--use_deepspeed": "needs a script under DeepSpeed; tests/learn/test_script_deepspeed.py runs one",
    "--deepspeed ds_config.json": "needs a script under DeepSpeed; tests/learn/test_script_deepspeed.py runs some",
    "estimator=xmem": "trains a ViT for real, for minutes",
    "farm.serve": "stays until it is stopped; tests/farm/test_serving.py runs it",
    "farm.slurm": "needs a service; tests/farm/test_slurm.py runs it",
    "farm.kueue": "needs an API server; tests/farm/test_kubernetes.py runs it",
    "farm.sbatch": "needs a batch script; tests/farm/test_slurm.py runs it",
    "--server": "needs a service; tests/farm/test_serving.py runs it",
    "wait=true": "stays until it is stopped; tests/farm/test_service.py runs it",
    "cluster.address=auto": "needs a running Ray cluster",
    "estimators=[trace,lightgbm]": "traces and fits for half a minute; tests/learn/test_benchmark.py runs it",
    "target=step_time data=steps": "needs published steps; tests/learn/test_benchmark_steps.py asks about made-up ones",
    "target=slowdown": "needs published pairs; tests/learn/test_sharing.py asks about made-up ones",
    "source=lucid": "needs published pairs; tests/warehouse/test_collocations.py imports made-up ones",
    "path=gavel_throughputs.csv": "a published file, which does not come along",
    "published=": "needs the published measurements; tests/learn/test_benchmark.py runs it on files like these",
    "learn.calibrate data=": "needs runs of a GPU; tests/learn/test_calibration.py runs it on files like these",
    "learn.build_defaults": "needs the published measurements; tests/learn/test_build_defaults.py runs it",
    "source=gpumemnet": "needs GPUMemNet's files; tests/warehouse/test_ingest.py runs it on files like these",
    "source=dataset": "loads what measured runs lie in datasets/; tests/warehouse/test_dataset.py runs it",
    "farm.compare before=": "needs two environments or folders to compare; tests/farm/test_compare.py runs it",
    "workspaces=cudnn": "needs cuDNN; tests/featurize/asking_cudnn/test_workspaces.py runs it where it is installed",
    "learn.fit_kernels": "needs a published file; tests/learn/test_fit_kernels.py fits on made-up rows",
    "learn.fit_bound": "needs answers beside measurements; tests/learn/test_fit_bound.py fits on made-up rows",
    "warehouse.export ": "needs runs with telemetry; tests/warehouse/test_dataset.py runs it",
}
# In a sentence these may stand without arguments.
MENTIONED = ("farm.submit", "learn.estimate", "learn.fit", "warehouse.query", "warehouse.export", "warehouse.diff")
NETS = """
from torch import nn

def build(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(1), nn.LazyLinear(10))
def small(): return nn.Sequential(nn.Flatten(1), nn.Linear(3 * 64 * 64, 10))
def large(depth=2): return nn.Sequential(nn.Flatten(1), *[nn.Linear(3 * 64 * 64, 3 * 64 * 64) for _ in range(depth)])

def make_gpt(): return nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100))

class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(100, 16), nn.Linear(16, 100)

    def forward(self, input_ids, labels, pixel_values=None):
        logits = self.head(self.tokens(input_ids))
        logits = logits if labels.dim() == 2 else logits.mean(1)
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten()), "logits": logits}

def make_bert(): return Bert()
"""


def why_not_run(command):
    if not command.arguments and command.module in MENTIONED:
        return "a mention, without what it needs"
    return next((reason for part, reason in NOT_RUN.items() if part in command.text), None)


def fill_place(place):
    """Make all that the documents' commands read in a folder: a data folder with runs and snapshots, models, files."""
    (place / "mypackage").mkdir(parents=True)
    (place / "mypackage" / "nets.py").write_text(NETS)
    (place / "jobs.jsonl").write_text(f"{JSON}\n{JSON}\n")
    shutil.copy(ROOT / "conf" / "device" / "A10.yaml", place / "half.yaml")
    (place / "numbers.csv").write_text("kind,mib,reserved_mib,cudnn\nidle,300,,\nprocess,900,64,true\n")
    (place / "mine.csv").write_text("net,bs,mem,end\nresnet18,8,1000,ok\nresnet50,8,2000,ok\n")
    (place / "timm_a100.csv").write_text("model,module,batch_size,max_gpu_memory_mib\nresnet18,resnet,8,1000\n")
    data = DataFolder.resolve(place / "data").create()
    write_batch(data, make_configs(90, seed=4), source="measured", job="measured")
    from farm.queue.jobs import Job, Queue

    with Queue.open(data.queue) as queue:
        about = {"space_json": "{}", "seed": 0, "policy": "uniform", "priority": 0, "device": "{}"}
        job = Job(job_id="cnn-3f2a9c1b", family="cnn", n=1, settings_json="{}", submitted_at=0.0, **about)
        queue.submit(job, [(0, JSON)])
    from warehouse.files.snapshots import take_snapshot

    for name in ("2026-11-19", "2026-11-20"):
        take_snapshot(data, name)


def composed(command):
    """The arguments with which a command prints its settings and does nothing."""
    arguments = [*command.arguments]
    if "--cfg" not in arguments:
        at = arguments.index("--") if "--" in arguments else len(arguments)  # behind it is a script's own command
        arguments[at:at] = ["--cfg", "job"]
    return arguments


def small(command, written):
    """The arguments of a small run, which writes into the folder `written` where the document has one of its own."""
    arguments = [*command.arguments, *SMALL.get(command.module, ())]
    for folder in ("/srv/farm", "/srv/gpufarm", "/mnt/farm"):
        arguments = [argument.replace(f"={folder}", "=data") for argument in arguments]
    return [argument.replace("=/srv/", f"={written}/").replace("=/tmp/", f"={written}/") for argument in arguments]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("documented") / "a'; echo foo"
    fill_place(place)
    return place


@pytest.fixture
def here(place, monkeypatch):
    monkeypatch.chdir(place)
    monkeypatch.setenv("GPUFARM_DATA", str(place / "data"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), *filter(None, [os.environ.get("PYTHONPATH")])]))
    monkeypatch.syspath_prepend(str(place))
    return place


def test_the_documents_have_commands_and_each_reason_belongs_to_one():
    assert len(COMMANDS) > 60
    assert not [part for part in NOT_RUN if not any(part in command.text for command in COMMANDS)]


@pytest.mark.parametrize(
    "command",
    [command for command in COMMANDS if why_not_run(command)],
    ids=lambda command: f"{command.source}: {command.text}",
)
def test_a_documented_command_that_is_not_run_composes(command):
    code, _, err = run_module(command.module, *composed(command))
    assert code == 0, err


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=pytest.mark.spread(1 if command.source == "README.md" else 8))
        for command in COMMANDS
        if not why_not_run(command)
    ],
    ids=lambda command: f"{command.source}: {command.text}",
)
def test_a_documented_command_runs(command, here, monkeypatch, tmp_path):
    if command.module in ("farm.submit", "farm.work", "farm.grow"):
        monkeypatch.setenv("GPUFARM_DATA", str(DataFolder.resolve(tmp_path / "data").create().root))
    code, _, err = run_module(command.module, *small(command, tmp_path))
    assert code == 0, err
