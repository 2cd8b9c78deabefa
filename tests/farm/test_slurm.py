"""The daemon behind Slurm's plugin, and the command that estimates a batch script before it submits it."""

from __future__ import annotations

import json
import os
import runpy
import shlex
import sys
from pathlib import Path

import pytest

from conf.errors import UsageError
from farm import sbatch
from farm.sbatch import SbatchSettings, entry, training_command
from farm.slurm import read_table
from learn import estimate
from tests.farm.served import MLP

DEVICES = "devices={A100-SXM4-40GB: a100, L4: l4}"
TRAINING = """
import torch

model = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(100):
    optimizer.zero_grad()
    model(torch.randn(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def answered(service, tmp_path, handlers, shown):
    def answered(*directives: str) -> dict:
        table = tmp_path / "a'; echo foo.tsv"
        Path(f"{table}.wanted").write_bytes(os.fsencode("".join(f"{one}\n" for one in directives)))
        shown("slurm", DEVICES, f"server={service.url}", f"table={table}", "once=true")
        assert not Path(f"{table}.wanted").read_text()
        return read_table(table)

    return answered


def test_wanted_directives_are_answered_once_and_kept(answered):
    small = json.dumps({"config": MLP})
    large = json.dumps({"config": {**MLP, "input_size": 40_000, "classes": 40_000, "batch_size": 4096}})
    several = json.dumps({"config": MLP, "parallel": "ddp=2"})
    rows = answered(small, large, small, several)
    assert (rows[small].gpus, rows[small].fits, rows[small].features) == (1, "yes", "a100|l4")
    assert rows[small].comment.startswith("gpufarm: ") and "MiB, bound" in rows[small].comment
    assert rows[large].fits == "no" and "fits no GPU of this cluster" in rows[large].comment
    assert (rows[several].gpus, rows[several].fits) == (2, "yes")
    assert set(answered(json.dumps({"config": {**MLP, "depth": 1}}))) > set(rows)


@pytest.mark.parametrize(
    "directive",
    [
        "[1]",
        '{"config": {"family": "nope"}}',
        '{"\u2028": "caf\udce9"}',
        '{"model": "\\ud800:x"}',
    ],
)
def test_a_directive_that_makes_no_sense_says_why_and_changes_no_job(answered, directive):
    ((noted, row),) = answered(directive).items()
    assert noted == directive
    assert row.fits == "unknown" and row.comment.startswith("gpufarm: ") and not row.features


def test_a_service_that_does_not_answer_loses_no_directive(tmp_path, handlers, refused, monkeypatch):
    monkeypatch.setattr("learn.client._RECONNECT_S", 0.1)
    (tmp_path / "t.tsv.wanted").write_text("{}\n")
    arguments = DEVICES, "server=http://127.0.0.1:1", f"table={tmp_path}/t.tsv", "once=true"
    assert "does not answer" in refused("slurm", *arguments)
    assert (tmp_path / "t.tsv.wanted").read_text() == "{}\n"


# ---- sbatch


@pytest.mark.parametrize(
    ("text", "command", "folder"),
    [
        ("python train.py --lr 1", ["python", "train.py", "--lr", "1"], ""),
        ("module load x\nsrun --ntasks=1 python3 -u train.py", ["python", "-u", "train.py"], ""),
        (
            "/opt/env/bin/torchrun --nproc-per-node 2 \\\n train.py",
            ["torchrun", "--nproc-per-node", "2", "train.py"],
            "",
        ),
        ('OMP_NUM_THREADS=4 python train.py "$@"', ["python", "train.py", "x", "here"], ""),
        ("python train.py $2  # quick", ["python", "train.py", "here"], ""),
        ("cd here\npython train.py\ncd nowhere", ["python", "train.py"], "here"),
        ("cd here/../here || exit 1\npython train.py", ["python", "train.py"], "here"),
        ("cd here; cd ${SLURM_SUBMIT_DIR}/its\npython train.py", ["python", "train.py"], "its"),
        ("cd $2\npython train.py", ["python", "train.py"], "here"),
        ("export WORK=here\nmodule load x\npushd -- $WORK/\npython train.py", ["python", "train.py"], "here"),
        ("(cd nope; ls)\npython train.py", ["python", "train.py"], ""),
    ],
)
def test_the_training_command_of_a_batch_script_and_where_it_runs(text, command, folder, tmp_path):
    for name in ("here", "its"):
        (tmp_path / name).mkdir()
    training = training_command(f"#!/bin/bash\n#SBATCH --time=1\n{text}\n", ["job.sh", "x", "here"], tmp_path)
    assert (list(training.words), training.folder.resolve()) == (command, tmp_path / folder)


NO_FOLDER = r"not a folder here|only the shell knows"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("echo hi", r"job\.sh"),
        ("python a.py\npython b.py", r"job\.sh"),
        ("python train.py | tee log", r"job\.sh"),
        ("python `hostname`.py", r"job\.sh"),
        ("srun --chdir=x python train.py", r"job\.sh"),
        ("cd nowhere\npython train.py", NO_FOLDER),
        ('cd "$(dirname "$0")"\npython train.py', NO_FOLDER),
        ("cd $GPUFARM_NOT_SET\npython train.py", NO_FOLDER),
        ("cd -\npython train.py", NO_FOLDER),
        ("if true; then\ncd here\nfi\npython train.py", NO_FOLDER),
        ("false || cd here\npython train.py", NO_FOLDER),
        (f"cd {'x' * 5000}\npython train.py", NO_FOLDER),
    ],
)
def test_a_script_without_one_command_that_trains_in_a_known_folder_is_told(text, words, tmp_path):
    (tmp_path / "here").mkdir()
    with pytest.raises(UsageError, match=words):
        training_command(text, ["job.sh"], tmp_path)


@pytest.mark.parametrize("runs", [False, pytest.param(True, marks=pytest.mark.wide)])  # wide: torch in a process
def test_a_batch_script_is_estimated_where_it_goes_to_and_submitted_with_what_it_needs(
    tmp_path, monkeypatch, capfd, runs
):
    def estimated(words, *, device, time_limit_s):
        assert words == ("python", "train.py") and Path.cwd() == folder
        return estimate(MLP, device=device)

    if not runs:
        monkeypatch.setattr("learn.script.estimating.estimate_script", estimated)
    folder = tmp_path / "above" / "below"
    folder.mkdir(parents=True)
    (folder / "train.py").write_text(TRAINING)
    script, fake = tmp_path / "job.sh", tmp_path / "fake_sbatch"
    directives = "#SBATCH --job-name=it's\n#SBATCH --chdir=nowhere\n"
    script.write_text(f"#!/bin/bash\n{directives}cd $SLURM_SUBMIT_DIR/below\npython train.py\n")
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nexit 3\n')
    fake.chmod(0o755)
    options = ["-p", "gpu", "-D", "above"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["", "devices={L4: l4}", f"sbatch={fake}", "--", *options, "job.sh", "x"])
    monkeypatch.delitem(sys.modules, "farm.sbatch")  # it runs as a program
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("farm.sbatch", run_name="__main__")
    assert ended.value.code == 3  # sbatch's own
    out, err = capfd.readouterr()
    comment, *added = out.splitlines()
    assert comment.startswith("--comment=gpufarm: ")
    assert added == ["--gres=gpu:1", "--constraint=l4", *options, "job.sh", "x"]
    assert "L4: " in err and "fits" in err


@pytest.mark.parametrize(
    ("directive", "added"),
    [
        ("--time=1", ["--comment=gpufarm: ", "--gres=gpu:1", "--constraint=a100|l4"]),
        ("--time=1 --gres=gpu:2 -C v100 --comment=mine", []),
    ],
)
def test_what_the_script_leaves_open_is_added_and_what_it_says_itself_stays(
    tmp_path, monkeypatch, capsys, directive, added
):
    estimates = {name: estimate(MLP, device=name) for name in ("A100-SXM4-40GB", "L4")}
    monkeypatch.setattr(sbatch, "_estimates", lambda _training, _settings: estimates)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH {directive}\npython train.py\n")
    settings = SbatchSettings(devices={"A100-SXM4-40GB": "a100", "L4": "l4"}, dry_run=True)
    assert entry(settings, [str(script)]) == 0
    program, *options, last = shlex.split(capsys.readouterr().out)
    assert (program, last, len(options)) == ("sbatch", str(script), len(added))
    assert all(option.startswith(start) for option, start in zip(options, added, strict=True))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (b"#SBATCH --job-name=it's\n./train\n", ["x"]),
        (b"#SBATCH --time=1 \\", []),
        (b"python train.py $@\n", ["a\\d", "\\1", "it's"]),
        (b"# gr\xfc\xdfe\npython tr\xe4in.py\n", []),
        (b"\xff\xfe\x00\x01\npython \x00.py", []),
        (b"'" * 5000, []),
        (b"#SBATCH -D nowhere\npython train.py\n", []),
    ],
)
def test_a_script_that_cannot_be_followed_is_submitted_as_it_is(tmp_path, monkeypatch, capsys, text, arguments):
    (tmp_path / "job.sh").write_bytes(text)
    monkeypatch.chdir(tmp_path)
    assert entry(SbatchSettings(devices={"L4": "l4"}, dry_run=True), ["job.sh", *arguments]) == 0
    out, err = capsys.readouterr()
    assert shlex.split(out) == ["sbatch", "job.sh", *arguments]
    assert err.startswith("note: not estimated: ") and err.count("\n") == 1 and err.strip().isprintable()
    assert (tmp_path / "job.sh").read_bytes() == text
