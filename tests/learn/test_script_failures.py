"""A script that cannot be followed ends in one line with exit code 2; what it leaves is data, and never believed."""

import dataclasses
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from conf.errors import UsageError
from conf.files import disk_cache
from featurize.device.device_spec import describe_device
from featurize.job.layout import Parallel
from featurize.recording.step_trace import Block, Collective, Event, Operator, StepTrace
from learn import estimate_script
from learn.commands.estimate import _OF_OTHER_JOBS, EstimateSettings, entry_of_script
from learn.estimation import answers
from learn.script import estimating, records
from learn.script.command_line import parse_command
from learn.script.records import BadRecord, ScriptRecord, read_record, write_record
from tests.conf.test_children import DAEMON, WAIT
from tests.surroundings import ENDS_WITHIN_S, await_note

LOOP = """
import torch
model = torch.nn.Linear(8, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.randn(2, 8, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def write_script(folder, text):
    path = folder / "train.py"
    path.write_text(text)
    return ["python", str(path)]


@pytest.mark.usefixtures("prepared_scripts")
def test_an_error_of_the_script_names_its_file_and_line(tmp_path):
    command = write_script(
        tmp_path, "import torch\nmodel = torch.nn.Linear(8, 4).cuda()\nmodel(torch.zeros(2, 9).cuda())\n"
    )
    with pytest.raises(UsageError, match=r"^train.py cannot be followed: .*train.py:3: RuntimeError in operator"):
        estimate_script(command)


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_scripts")
@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import torch\nprint('all there is')\n", "train.py ends without using cuda"),
        (
            "import torch\nx = torch.nn.Linear(8, 4).cuda()(torch.zeros(2, 8).cuda())\n",
            "without an optimizer step on cuda",
        ),
        (LOOP.replace("range(3)", "range(1)"), "ends after 1 optimizer step; two are needed"),
        ("raise SystemExit(3)\n", "exits with 3"),
        ("import os\nprint('last words', flush=True)\nos._exit(4)\n", "with code 4 .*its output ends: last words"),
        ("x = )\n", "SyntaxError"),
        (
            "import torch\ntorch.compile(torch.nn.Linear(8, 4).cuda(), mode='reduce_overhead')\n",
            "Unrecognized mode=reduce_overhead, should be one of",
        ),
        (
            "import torch.distributed as dist\nfrom torch.distributed.fsdp import fully_shard\n"
            "import torch\ndist.init_process_group('nccl')\nfully_shard(torch.nn.Linear(8, 4).cuda())\n",
            "train.py:5: RuntimeError: fully_shard cannot be followed in one process: start the script with torchrun",
        ),
        (
            "import torch\ntorch.save(lambda: None, 'a.pt')\ntorch.load('a.pt')\n",
            "train.py:3: RuntimeError: a.pt cannot be read back: saving is suppressed while a script is estimated",
        ),
        (
            "import torch\ntorch.eye(4).to_sparse().cuda()\n",
            "train.py:2: RuntimeError: a sparse tensor cannot be followed onto the GPU",
        ),
        (
            "import torch, deepspeed\n"
            "deepspeed.initialize(model=torch.nn.Linear(8, 8), config={'train_batch_size': 8})\n",
            "train.py:2: RuntimeError: DeepSpeed on one GPU is not estimated; start",
        ),
        (
            "import torch.distributed as dist\ndist.init_process_group('nccl', rank=0, world_size=4)\n",
            "train.py:2: RuntimeError: the script asks for 4 processes and its command starts 1; start it with "
            "torchrun --nproc-per-node 4",
        ),
    ],
)
def test_a_script_without_two_steps_is_told_so(tmp_path, text, reason):
    command = write_script(tmp_path, text)
    with pytest.raises(UsageError, match=reason) as raised:
        estimate_script(command)
    assert "\n" not in str(raised.value)


def test_keys_of_other_jobs_are_refused_beside_a_script():
    with pytest.raises(UsageError, match=r"^a script says itself what it trains; leave optimizer out$"):
        entry_of_script(EstimateSettings(optimizer="sgd"), ["python", "train.py"])


@pytest.mark.slow
@pytest.mark.usefixtures("prepared_scripts")
def test_side_effects_are_kept_from_happening_and_noted(tmp_path):
    with socket.create_server(("127.0.0.1", 0)):
        command = write_script(
            tmp_path,
            "import socket, sys, torch, wandb, torch.distributed\n"
            "wandb.init(project='p', config={}).log({'x': 1})\n"
            "try:\n    socket.create_connection(('192.0.2.1', 80), timeout=1)\n    sys.exit('connected')\n"
            "except OSError:\n    pass\n" + LOOP + "    torch.save(model.state_dict(), 'model.pt')\n",
        )
        notes = estimate_script(command, estimator="trace").warnings
    assert "files that the script saves were kept in a folder that is removed" in notes
    assert "wandb was kept from logging" in notes
    assert "a network connection was refused: scripts run offline here" in notes
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


TRACE = StepTrace(
    operators=(Operator("aten::mm", "forward", "float32", ((2, 2),), ((2, 2),), 16, 32, 16, 1, "fc", (-1,)),),
    events=(Event(0, 16, 0, "setup"), Event(1, 32, 1, "forward"), Event(1, -32, 1, "backward")),
    blocks=(Block(16, "parameter"), Block(32, "activation", "aten::mm", "fc")),
    parameters=4,
    parameter_bytes=16,
    compute_capability=(8, 0),
)
RECORD = ScriptRecord(
    trace=TRACE,
    problem=None,
    settings={"optimizer": "adam", "precision": "fp32", "cudnn_benchmark": False},
    batch_size=2,
    notes=("a note",),
)


def test_a_record_is_read_as_it_was_written(tmp_path):
    sent = (Collective("broadcast", 8, 0, 0), Collective("all_gather", 32, 0, 1, "4x2"))
    of_ranks = dataclasses.replace(
        RECORD, parallel=Parallel(ddp=8, bucket_cap_mb=2.5), trace=dataclasses.replace(TRACE, collectives=sent)
    )
    for record in (RECORD, of_ranks):
        write_record(tmp_path, record)
        assert read_record(tmp_path) == record


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content.pop("trace"),
        lambda content: content.update(batch_size=-1),
        lambda content: content["settings"].update(optimizer=["adam"]),
        lambda content: content["settings"].update(optimiser="adam"),
        lambda content: content["settings"].update(clip_norm=float("inf")),
        lambda content: content["settings"].update(accumulation=True),
        lambda content: content["trace"]["events"].append([9, 16, 1, "forward"]),
        lambda content: content["trace"]["events"].append([0, 8, 1, "forward"]),
        lambda content: content["trace"]["events"].append([1, -32, 1, "forward"]),
        lambda content: content["trace"]["events"].append([0, -16, 9, "forward"]),
        lambda content: content["trace"]["blocks"][0].__setitem__(1, "junk"),
        lambda content: content["trace"]["blocks"][0].__setitem__(0, 2**80),
        lambda content: content["trace"]["operators"][0].__setitem__(10, [5]),
        lambda content: content["trace"]["operators"][0].__setitem__(5, 1.5),
        lambda content: content.update(parallel={"ddp": "many"}),
        lambda content: content.update(parallel={"ddp": 8, "colour": 1}),
        lambda content: content["trace"].update(collectives=[["gossip", 8, 0, 0, ""]]),
        lambda content: content["trace"].update(collectives=[["all_reduce", 8, 1, 0, ""]]),
        lambda content: content["trace"].update(collectives=[["all_reduce", 8, 0, 9, ""]]),
        lambda content: content["trace"].update(collectives=[["all_reduce", 8, 0, 0, "8x0"]]),
    ],
)
def test_a_record_that_the_script_has_written_over_is_refused(tmp_path, damage):
    path = tmp_path / "record.json"
    write_record(tmp_path, RECORD)
    content = json.loads(path.read_text())
    damage(content)
    path.write_text(json.dumps(content))
    with pytest.raises(BadRecord):
        read_record(tmp_path)


def test_texts_of_a_record_reach_no_terminal_as_they_are(tmp_path):
    write_record(tmp_path, dataclasses.replace(RECORD, notes=("\x1b[31mred\n",)))
    assert re.fullmatch(r"\\x1b\[31mred\\n", read_record(tmp_path).notes[0])


DEVICE = describe_device("A100-SXM4-40GB")


@pytest.mark.usefixtures("prepared_scripts")
def test_measured_runs_at_the_scripts_batch_move_its_estimate_and_others_are_refused(tmp_path):
    command = write_script(tmp_path, LOOP)
    here, elsewhere = ([{"batch_size": size, "memory_mib": 700.0}] for size in (2, 8))
    done = estimate_script(command, known=here)
    assert done.process_mib < 700 and done.answered_by["memory"] == "trace with 1 measured run"
    for given, message in (
        ({"known": elsewhere}, r"known\[0\] is of batch_size=8, and the script"),
        ({"known": here, "estimator": "hybrid"}, "cannot be combined with estimator=hybrid"),
        ({"known": "runs"}, "known=runs is for trial configs"),
        ({"estimator": "xmem"}, "trace, hybrid, gnn, got estimator='xmem'"),
        ({"batch_size": 8}, "unknown keyword 'batch_size'; known: allocator, coverage"),
    ):
        with pytest.raises(UsageError, match=message):
            estimate_script(command, **given)


def test_every_key_of_the_command_is_passed_on_or_refused_beside_a_script(monkeypatch):
    passed = {}
    monkeypatch.setattr(estimating, "estimate_script", lambda command, **given: passed.update(given))
    monkeypatch.setattr(EstimateSettings, "print_answer", lambda *_: None)
    entry_of_script(EstimateSettings(), ["python", "train.py"])
    neither = {field.name for field in dataclasses.fields(EstimateSettings)} - {*passed, *_OF_OTHER_JOBS}
    assert neither == {"method", "format", "notes"}  # which are checked, or printed by


# -- a script's own processes end with it; `tests/conf/test_children.py` has the limits


@pytest.mark.slow
def test_sigterm_of_the_command_ends_the_script_with_its_daemon_and_leaves_no_folder(tmp_path):
    (tmp_path / "temporary").mkdir()
    (tmp_path / "train.py").write_text(DAEMON + WAIT)
    note = tmp_path / "daemon"
    command = [sys.executable, "-m", "learn.estimate", "--", "python", "train.py", str(note)]
    environment = {**os.environ, "TMPDIR": str(tmp_path / "temporary")}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as estimating:
        await_note(note, estimating)
        processes = psutil.Process(estimating.pid).children(recursive=True)
        estimating.terminate()
    assert estimating.returncode == -signal.SIGTERM
    assert int(note.read_text()) in [process.pid for process in processes]
    assert not psutil.wait_procs(processes, timeout=ENDS_WITHIN_S)[1]
    assert not [path for path in (tmp_path / "temporary").iterdir() if path.name.startswith("gpufarm")]


# -- a script that ran before is answered from disk, as long as all that it looked at is as it was


NAMES = "('more.txt', 'longer than a name may be' * 12, 'a\\0b')"
TRAIN = f"import os, widths\nwidth = widths.WIDTH + sum(map(os.path.exists, {NAMES}))\n" + LOOP.replace("8", "width")


@pytest.fixture
def files_of_an_hour_ago(prepared_scripts, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUFARM_CACHE", str(tmp_path / "cache"))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    write("train.py", TRAIN)
    write("widths.py", "WIDTH = 8\n")


def write(path, text):
    with open(path, "w") as file:
        file.write(text)
    os.utime(path, (time.time() - 3600,) * 2)


@pytest.mark.usefixtures("files_of_an_hour_ago")
def test_a_script_runs_again_only_where_something_that_it_looked_at_has_changed(tmp_path, monkeypatch):
    def parameters(**settings):
        answers.clear()  # what this process remembers
        return estimate_script(["python", "train.py"], estimator="trace", **settings).parameters

    def run_again(*_args):
        raise ChildProcessError("the script runs again")

    assert parameters() == 36
    monkeypatch.setattr(estimating, "_record", run_again)
    assert parameters() == parameters(coverage=0.9) == parameters(report=tmp_path / "page.html") == 36
    os.mkdir("more.txt")
    with pytest.raises(ChildProcessError, match="the script runs again"):
        parameters()


@pytest.mark.usefixtures("files_of_an_hour_ago")
def test_a_run_is_kept_with_the_state_of_its_files():
    key = records.key_of(parse_command(["python", "train.py"]), DEVICE)
    record = dataclasses.replace(RECORD, files=("widths.py", "missing.txt"))
    kept = records.keep(key, record, time.time_ns())
    found = records.find(key)
    assert records.with_trace(found) == dataclasses.replace(kept, files=None)
    assert kept.key and found == dataclasses.replace(kept, files=None, trace=None)
    for path in record.files:
        write(path, "# changed")
        assert records.find(key) is None
    damaged = {**records.record_to_json(RECORD), "trace": None, "files": {b"missing": None}}
    disk_cache.keep({key: damaged})
    assert records.find(key) is None
    open("missing.txt", "w").close()  # since the run began
    assert records.keep(key, record, time.time_ns() - 10**9).key is None


@pytest.mark.usefixtures("files_of_an_hour_ago")
@pytest.mark.parametrize(
    ("words", "more", "device", "same"),
    [
        ("python train.py --lr 1", "", "A100-SXM4-40GB", False),
        ("python -u train.py", "", "A100-SXM4-40GB", True),
        ("env A=b python train.py", "", "A100-SXM4-40GB", False),
        ("python train.py", "# more", "A100-SXM4-40GB", False),
        ("python train.py", "", "L4", False),
    ],
)
def test_another_command_is_another_run(words, more, device, same):
    first = records.key_of(parse_command(["python", "train.py"]), DEVICE)
    write("train.py", TRAIN + more)
    again = records.key_of(parse_command(words.split()), describe_device(device))
    assert (again == first) == same
