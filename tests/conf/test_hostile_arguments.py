"""Every command against hostile arguments: one `error: ...` line, exit code 2, nothing written.

500 command lines with a fixed seed, made of the commands' own keys, values that their kinds refuse, and spellings that
Hydra or OmegaConf would choke on or take in silence.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

import conf
from conf.cli.command_line import load_config, plain_values
from conf.cli.commands import COMMANDS, settings_class
from conf.cli.settings import documented_keys, flat, groups_of, kinds_of
from tests.surroundings import run_module

SEED, CASES = 11, 500
GROUPS = sorted({path.parent.name for path in Path(conf.__file__).parent.glob("*/*.yaml")})
LONGEST_LINE = 6000
# What a command needs, so that nothing but the hostile argument is wrong. None of it starts a trial.
NEEDED = {
    "submit": ["+arch=mlp", "n=1", "detach=true"],
    "grow": ["n=1", "dry_run=true"],
    "query": ["SELECT 1"],
    "cancel": ["job=none"],
    "compare": ["before=none", "after=none"],
    "diff": ["before=none"],
    "ingest": ["source=csv", "path=none.csv", "family=cnn"],
    "publish": ["out=published", "licence=CC0"],
    "export": ["out=exported"],
    "fit": ["target=memory"],
    "estimate": ["run=none"],
    "plan": ["model=none:none", "input=[1]", "gpus=8"],
    "benchmark": ["target=memory"],
    "build_defaults": ["path=none", "out=new"],
    "fit_bound": ["rows=none"],
    "admit": ["job={memory_mib:1}"],
    "slurm": ["devices={L4:l4}", "once=true", "table=nope/x"],
    "sbatch": ["devices={L4:l4}"],
    "kueue": ["once=true", "api=http://127.0.0.1:1"],
    "replay": ["n=2", "seeds=[0]"],
}
WITHOUT_A_FOLDER = ("slurm", "sbatch", "kueue", "fit_bound")
MAKE_THEIR_FOLDER = ("submit", "grow", "ingest", "compare", "build_defaults")
MLP = "{family: mlp, batch_size: 8, input_size: 8, classes: 2, depth: 1}"

TOO_LARGE = ("99999999999999999999", "-99999999999999999999", "1e400", "-1e400")
NO_NUMBER = (
    "nan",
    "inf",
    "-inf",
    "true",
    "many",
    "[1]",
    "{a:1}",
    "''",
    "",
    "'5'",
    "1,2,3",
    "range(1,5)",
    "choice(1,2)",
    "interval(1,2)",
    "glob(*)",
    "${nope}",
    "${oc.env:GPUFARM_NOT_SET}",
    "${",
    "[",
    "{",
    "'",
    "1]",
    "\\",
    "a\\",
    "0x",
    "\x00",
    "\udcff",
    "\u202e1",
    "[" * 3000,
    "(" * 3000,
    "1" * 30_000,
)
REFUSED = {
    "int": (*NO_NUMBER, *TOO_LARGE, "1.5", "1e3", "null"),
    "number": (*NO_NUMBER, "1e400", "-1e400", "null"),
    "bool": ("2", "maybe", "nan", "null", "[true]", "{a: 1}", "''", "", "true,false", "${nope}", "'true'", "tru\x00e"),
    "text": ("", "''", "null", "[a]", "{a:1}", "[a", "{", "'", '"a', "'a'b", "\udcff", "a\x00b", "x" * 1_000_001),
    "path": ("", "''", "null", "[a]", "{a:1}", "'", "a\udcff", "a\x00b", "x" * 1_000_001),
    "new path": ("", "''", "null", "[a]", "{a:1}", "'", "${nope}", "${oc.env:GPUFARM_NOT_SET}", "a/${b}", "a\udcff"),
    "any text": ("", "''", "null", "'", "a\udcff", "a\x00b"),
    "mapping": ("5", "[a]", "nan", "null", "true", "''", "", "{a", "{a:{", "${nope}", "a,b"),
    "list": ("5", "{a:1}", "nan", "null", "true", "''", "", "[", "[1,", "${nope}", "[a]]"),
    "list of text": (
        "5",
        "{a:1}",
        "nan",
        "null",
        "true",
        "''",
        "",
        "[1]",
        "[null]",
        "[[a]]",
        "[a",
        "${nope}",
        "[${nope}]",
    ),
    "list of int": ("5", "{a:1}", "nan", "null", "a", "[a]", "[1.5]", "[null]", "[true]", "[[1]]", "[1", "1,2"),
}
NO_GROUP_CHOICE = ("[a,b]", "nope", "{a:1}", "5", "../x", "", "''", "a,b", "${nope}", "nan", "choice(a,b)")
# Whatever the key is: deletions, additions, packages, lists, options of Hydra's own.
SPELLINGS = (
    "~{key}",
    "~{key}=1",
    "+{key}=1",
    "++{key}=1",
    "{key}@x=1",
    "{key}:=1",
    "{key}[0]=1",
    "hydra.{key}=1",
    "+hydra.{key}=x",
    "{key}.0=1",
    "{key} =1",
    " {key}=1",
    "é{key}=1",
    "{key}é=1",
    "-{key}=1",
    "--{key}",
    "x{key}x=1",
    "{key}..=1",
    "{key}.__class__=1",
    "$" + "{{{key}}}=1",
    "{key}{deep}=1",
    "@{key}=1",
    ".{key}=1",
    "{key}\x00=1",
)
ARGUMENTS = (
    "=1",
    "=",
    "~data",
    "~",
    "+",
    "++=1",
    "+@x=1",
    "@x=1",
    "hydra.run.dir=/tmp/x",
    "hydra/launcher=basic",
    "hydra=x",
    "hydra.job.chdir=true",
    "+hydra/launcher=submitit_local",
    "hydra.sweep.dir=x",
    "--multirun",
    "-m",
    "--config-dir",
    "--config-dir=/etc",
    "--config-name=x",
    "-cn",
    "--cfg",
    "--cfg=job",
    "--resolve",
    "--package",
    "--info",
    "--version",
    "-",
    "--",
    "x.0=1",
    "x=1",
    "_target_=os.system",
    "_self_=1",
    "defaults=[]",
    "+defaults=[]",
    "data",
    "\n=1",
    "a=b=c",
    "\x1b[31m=1",
    "a." * 500 + "b=1",
    "a" * 100_000,
    "k" * 100_000 + "=1",
    "\udcff",
    "\udcff=1",
    "+arch@foo=cnn",
    "arch=cnn",
    "++arch=cnn",
    "+arch=[cnn,mlp]",
    "+arch=none",
    "+cluster=local",
    "+window=fixed",
    "+device=cpu",
    "/etc/passwd",
    "é",
    "{a: 1}",
    "[1]",
)


class Case(NamedTuple):
    command: str
    arguments: tuple[str, ...]
    named: str  # what the message has to name


def defaults_of_groups(name: str) -> dict[str, str]:
    chosen = groups_of(settings_class(name))
    return {group: one.default or "null" for group, one in chosen.items() if not one.group.added}


def known_keys(name: str) -> tuple[str, ...]:
    documented = [key.name for key in documented_keys(settings_class(name))]
    there = [key for key, _value in flat(plain_values(load_config(settings_class(name), [])))]
    return tuple(dict.fromkeys([*documented, *there]))


def refused_values(name: str) -> Iterator[Case]:
    """A value that its kind refuses, for every key of a command; and of groups what is no choice."""
    defaults, known = defaults_of_groups(name), known_keys(name)
    for key, kind in kinds_of(settings_class(name)).items():
        if key not in known:
            continue
        refused = [set(REFUSED[alternative]) for alternative in kind.names if alternative != "null"]
        for value in sorted(set.intersection(*refused) - ({"null"} if "null" in kind.names else set())):
            yield Case(name, (f"{key}={value}",), key)
    for group, default in defaults.items():
        for value in (*NO_GROUP_CHOICE, *(() if default == "null" else ("null",))):
            yield Case(name, (f"{group}={value}",), group)
    parents = {key.name.partition(".")[0] for key in documented_keys(settings_class(name)) if "." in key.name}
    for parent in sorted(parents):
        for value in ("null", "5", "[1]", "text", "nan", "''", "{nope: 1}", "${nope}", "true", "1,2"):
            yield Case(name, (f"{parent}={value}",), parent)


def refused_spellings(name: str) -> Iterator[Case]:
    for key in known_keys(name):
        for spelling in SPELLINGS:
            argument = spelling.format(key=key, deep=".a" * 200)
            if not (key in GROUPS and spelling in ("+{key}=1", "++{key}=1")):
                yield Case(name, (argument,), "")


def refused_arguments(name: str) -> Iterator[Case]:
    for argument in ARGUMENTS:
        if argument not in ("+arch=cnn",) and not (name == "diff" and "=" not in argument):
            yield Case(name, (argument,), "")


def cases() -> list[Case]:
    """The same 500 at every run, and as many of each command."""
    chance, of_commands = random.Random(SEED), []
    each = -(-CASES // len(COMMANDS))
    for name in sorted(COMMANDS):
        chosen: list[Case] = []
        kinds_of_case = [list(refused_values(name)), list(refused_spellings(name)), list(refused_arguments(name))]
        for count, several in zip((each - 2 * (each // 4), each // 4, each // 4), kinds_of_case, strict=True):
            chosen += chance.sample(several, min(count, len(several)))
        of_commands.append(chosen)
    return [case for turn in itertools.zip_longest(*of_commands) for case in turn if case is not None][:CASES]


def contents(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture
def invoke(monkeypatch, tmp_path_factory):
    """Run a command in this process, in an empty folder: (exit code, standard output, standard error)."""
    place = tmp_path_factory.mktemp("a'; echo foo") / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.delenv("GPUFARM_DATA", raising=False)

    def call(name: str, *arguments: str) -> tuple[int, str, str]:
        return run_module(COMMANDS[name], *arguments)

    call.place = place
    return call


def refusal(invoke, name: str, *arguments: str) -> str:
    """Return the one line with which a command refuses these arguments."""
    code, out, err = invoke(name, *arguments)
    assert (code, out) == (2, "") and err.startswith("error: ") and err.count("\n") == 1, (arguments, err)
    return err


# Values of the right kind, which the command itself refuses, beside those of tests/farm/test_submit.py and
# test_grow.py. Spaces part arguments.
REFUSED_BY_THE_COMMAND = {
    "submit": (
        "n=10000001",
        "n=100000000000",
        "batch_sizes=[]",
        "batch_sizes=[0]",
        "limits.max_parameters=0",
        "trial.prepare_ahead=no",
        "trial.quality_repeats=5",
        "trial.timeout_s=0",
        "log.keep=0",
        "trial.timeout_s=1e8",
        "log.format=x",
        "telemetry.dcgm_url=http://[",
        "window.min_steps=-1",
        "window.kind=x",
        "window.max_seconds=0.1",
        "cluster.object_store_mib=1",
        "data=/dev/null",
        "data=file",
        "device.backend=x",
        "device.model=../x",
        "device.memory_fraction=2",
        "device.count=100000",
        "arch.family=5",
        "arch.family=nope",
        "arch.family=null",
        "arch.space=null",
        "arch.space=5",
        "+arch.space.a.b=1",
        "arch.space.batch_size=nan",
        "arch.space.batch_size=[null]",
        "arch.space.batch_size={low:nan,high:2}",
        "arch.space.batch_size=[[1]]",
        "arch.space.batch_size=99999999999999999999",
        "arch.space.dropout={low:0.1,high:inf}",
        "arch.space.batch_size=${nope}",
        "device=RTX-4090 device.memory_mib=nan",
        "device=RTX-4090 device.memory_mib=inf",
        "device=RTX-4090 device.name=null",
        "device=RTX-4090 device.peak_tflops=null",
        "device=RTX-4090 device.compute_capability=x",
        "device=MI300X device.llvm_target=gfx1",
        "device=MI300X device.llvm_target=null",
        "device=RTX-4090 device.sm_count=1e400",
        "device=RTX-4090 device.power_limit_w=''",
    ),
    "grow": (
        "n=null",
        "hours=0",
        "hours=100001",
        "space={precision:[nan]}",
        "space={5:1}",
        "families=nope",
        "space={batch_size:99999999999999999999999}",
    ),
    "query": ("format=x", "out=/", "max_rows=0", "snapshot=nope", "snapshot=../x", "data=file", "format=parquet"),
    "status": ("format=xml", "job=nope", "data=file"),
    "cancel": ("job=a;b",),
    "doctor": ("format=x", "telemetry.dcgm_url=x"),
    "work": ("cluster.kind=x", "log.keep=0", "data=nope", "metrics.port=-1", "metrics.port=65536"),
    "diff": ("tolerance=-1", "format=x", "before=../x"),
    "compare": ("format=x", "before=/nope after=/nope", "tolerance=-1", "seed=-1", "policy=nope", "data=file"),
    "check": ("format=x", "data=nope", "data=file"),
    "compact": ("grace_s=-1", "min_files=1", "target_mib=0", "target_rows=0", "data=nope"),
    "export": ("source=x", "hz=0", "max_mb=0", "out=file"),
    "snapshot": ("name=../x", "verify=nope", "name=x list=true"),
    "publish": ("sources=[]", "sources=x", "hz=0", "published=soon", "out=file", "snapshot=nope"),
    "ingest": (
        "source=x",
        "columns=5",
        "columns={",
        "columns=[a]",
        "constants={batch_size:[1]}",
        "family=nope",
        "columns={a:*b}",
        "columns={a:!!python/object:x}",
        "columns=" + "[" * 5000,
        "constants={day:2026-99-99}",
        "source=timm columns={a:b}",
    ),
    "fit": ("target=x", "estimator=x", "family=x", "bin_gb=5", "seed=-1", "seed=2147483648", "snapshot=x", "data=nope"),
    "calibrate": ("format=x", "measured=/nope/x.csv", "device=cpu", "data=nope", "data=file idle_mib=5"),
    "benchmark": (
        "target=x",
        "estimators=[]",
        "files=[a]",
        "folds=1",
        "by=x",
        "rows=0",
        "limit_s=0",
        "out=/nope/x",
        "split=x",
    ),
    "build_defaults": ("seed=null", "seed=true", "distil=5", "path=file", "out=file"),
    "admit": (
        "format=x",
        "job={}",
        "job={speed:1}",
        "job={memory_mib:-1}",
        "job={smact:2}",
        "job={name:5}",
        "jobs=[5]",
        "memory_mib=0",
        "used_mib=-1",
        "risk=1",
        "risk=-1",
        "max_slowdown=0",
        "device=none",
        "job={family:nope}",
        "job={memory_mib:5,memory_bound_mib:4}",
    ),
    "slurm": ("devices={}", "devices={nope:a}", "devices={L4:a/b}", "table=/nope/x/y", "server=nope", "every_s=0"),
    "sbatch": ("devices={}", "devices={nope:a}", "time_limit_s=0", "devices={L4:l4}"),
    "kueue": ("api=nope", "every_s=0", "server=nope", "server=http://127.0.0.1:1/x"),
    "serve": (
        "host=0.0.0.0",
        "host=example.org",
        "port=65536",
        "port=-1",
        "processes=0",
        "traces=0",
        "token_file=file",
        "token_file=/nope/x",
        "trust=[a-b]",
        "cache_s=0",
        "limits.batch=0",
        "limits.inline_s=0",
        "data=nope",
        "certificate=file",
        "private_key=/nope/x",
        "log=/nope/x",
        "port=1 data=nope",
    ),
    "replay": (
        "format=x",
        "policy=nope",
        "policy=[]",
        "estimator=nope",
        "sharing=x",
        "n=0",
        "gpus=0",
        "seeds=[]",
        "seeds=[-1]",
        "seeds=[1,1]",
        "load=0",
        "risk=0",
        "max_slowdown=0",
        "lookahead=0",
        "max_jobs=0",
        "warmup_s=31",
        "trace=nope",
        "trace=/nope/x.json",
        "trace=nope.json",
        "device=none",
        "report=/nope/x",
    ),
    "fit_kernels": ("out=/nope/x", "data=nope", "steps=0"),
    "fit_bound": ("rows=/nope/x", "rows=nope out=/nope/x"),
    "plan": ("format=x", "gpus=1", "gpus=[]", "device=cpu", "parallel=ddp=8", "checkpointing=x", "report=/nope/x"),
    "estimate": (
        "format=x",
        "method=x",
        "estimator=x",
        "device=cpu",
        "config={}",
        "input=[1]",
        "run=a/b",
        "report=/nope/x",
        "parallel=cp=8",
    ),
}


def problems_of(case: Case, code: int, out: str, err: str) -> list[str]:
    """Return the flaws in how a hostile command line was refused."""
    problems = [] if code == 2 else [f"exit code {code}"]
    problems += [f"printed {out[:200]!r}"] * bool(out)
    if not (err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1):
        problems.append("not one line")
    if len(err) > LONGEST_LINE or not err[:-1].isprintable():
        problems.append("control characters, or far too long")
    if case.named not in err:
        problems.append(f"does not name {case.named}")
    return problems


def refusal_problems(invoke, tried: Iterable[Case]) -> list[str]:
    """Run the command lines beside what each command needs; a line for each that was not refused as it should be."""
    (invoke.place / "file").write_text("mine")
    (invoke.place / "data").mkdir()
    (invoke.place / "data" / "notes.txt").write_text("mine")
    before, wrong = contents(invoke.place), []
    for case in tried:
        keys = {argument.lstrip("+").partition("=")[0] for argument in case.arguments}
        needed = [one for one in NEEDED.get(case.command, []) if one.lstrip("+").partition("=")[0] not in keys]
        if "sql" in keys:
            needed = []
        if problems := problems_of(case, *(answer := invoke(case.command, *needed, *case.arguments))):
            line = " ".join(case.arguments)[:120]
            wrong.append(f"{case.command} {line!r}: {', '.join(problems)}: {answer[2][:300]}")
    if contents(invoke.place) != before:
        wrong.append(f"the folder holds {sorted(set(contents(invoke.place)) - set(before))}")
    return wrong


@pytest.mark.slow
def test_500_hostile_command_lines_are_one_line_each_and_change_nothing(invoke):
    tried = cases()
    assert len(tried) == CASES and {case.command for case in tried} == set(COMMANDS)
    wrong = refusal_problems(invoke, tried)
    assert not wrong, f"{len(wrong)} of {len(tried)}\n" + "\n".join(wrong[:40])


@pytest.mark.parametrize("exists", [False, True])
def test_a_command_that_reads_refuses_what_is_no_data_folder_in_one_line(invoke, exists):
    data = invoke.place / "a'; echo foo"
    if exists:
        data.mkdir()
    before, wrong = contents(invoke.place), []
    estimates = [("estimate", [f"config={MLP}", *more]) for more in ([], ["method=fast"], ["estimator=trace"])]
    readers = [(name, NEEDED.get(name, [])) for name in COMMANDS if name not in (*MAKE_THEIR_FOLDER, *WITHOUT_A_FOLDER)]
    for name, arguments in [*readers, *estimates]:
        code, out, err = invoke(name, *arguments, f"data={data}")
        problem = "has no format.json" if exists else "does not exist"
        if code != 2 or err.count("\n") != 1 or f"{data} {problem}" not in err or (out and name != "doctor"):
            wrong.append(f"{name}: {code} {out[:200]!r} {err!r}")
    assert not wrong and contents(invoke.place) == before, "\n".join(wrong)


def test_every_command_has_lines_that_only_it_can_refuse():
    assert set(REFUSED_BY_THE_COMMAND) == set(COMMANDS)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.spread(1 if name in ("query", "status") else 3)) for name in COMMANDS],
)
def test_what_only_the_command_can_refuse_is_one_line_each_and_changes_nothing(invoke, name):
    lines = REFUSED_BY_THE_COMMAND[name]
    wrong = refusal_problems(invoke, (Case(name, tuple(line.split(" ")), "") for line in lines))
    assert not wrong, f"{len(wrong)}\n" + "\n".join(wrong[:40])


# A command line that is odd and right, and what a key then holds.
RIGHT = [
    ("status", ["data=a\\b"], "data", "a\\b"),
    ("status", [r"data=a\\b\'c"], "data", r"a\\b\'c"),
    ("status", ["data=a, b = 'c'"], "data", "a, b = 'c'"),
    ("status", ["data='[a]'"], "data", "[a]"),
    ("status", ["data=[a"], "data", "[a"),
    ("status", ["data=a'; echo foo"], "data", "a'; echo foo"),
    ("status", ["data=grün\n"], "data", "grün\n"),
    ("status", ["data=2026"], "data", "2026"),
    ("status", ["data=true"], "data", "true"),
    ("status", ["data=a:b"], "data", "a:b"),
    ("status", ["data=null"], "data", None),
    ("status", ["data=a", "data=b"], "data", "b"),
    ("status", ["data=a", "data=null"], "data", None),
    ("status", ["data=null", "data=b"], "data", "b"),
    ("submit", ["n=1", "n=1_000"], "n", 1000),
    ("submit", ["n=int(5)"], "n", 5),
    ("submit", ["n=5", "seed=${n}"], "seed", 5),
    ("submit", ["n=1", "detach=True"], "detach", True),
    ("submit", ["limits.max_parameters=1e9"], "limits.max_parameters", 1e9),
    ("submit", ["device='cpu'", "device.count=2"], "device.count", 2),
    ("submit", ["+arch=mlp", "+arch.space.another=0.5"], "arch.space.another", 0.5),
    ("submit", ["+arch=cnn", "arch.space.image_size.low=64"], "arch.space.image_size.low", 64),
    ("submit", ["log={file: x, keep: 2}"], "log.keep", 2),
    ("grow", ["families=cnn"], "families", "cnn"),
    ("grow", ["families=[cnn, mlp]"], "families", ["cnn", "mlp"]),
    ("grow", ["hours=.5"], "hours", 0.5),
    ("grow", ["notify.command={ cat; } > /tmp/x"], "notify.command", "{ cat; } > /tmp/x"),
    ("grow", ["space={precision:[fp32,bf16]}"], "space", {"precision": ["fp32", "bf16"]}),
    ("query", ["SELECT '${x}', '\\${y}' = 'a\\\\${z}'"], "sql", "SELECT '${x}', '\\${y}' = 'a\\\\${z}'"),
    ("query", ["'quoted' is no statement"], "sql", "'quoted' is no statement"),
    ("query", ["sql=SELECT 1, 2", "format='csv'"], "sql", "SELECT 1, 2"),
    ("estimate", ["config={family: mlp, batch_size: 2}"], "config", {"family": "mlp", "batch_size": 2}),
    ("estimate", ["input=[[8,128],[8,128]]"], "input", [[8, 128], [8, 128]]),
    ("estimate", ["device=null"], "device", None),
    ("publish", ["citation=@misc{a, title={b}}"], "citation", "@misc{a, title={b}}"),
    ("publish", ["creators=[Ada Lovelace,'org:ACME']"], "creators", ["Ada Lovelace", "org:ACME"]),
    ("benchmark", ["published=a\\b"], "published", "a\\b"),
    ("benchmark", ["published=[a, b]"], "published", ["a", "b"]),
    ("build_defaults", ["path=${home}"], "path", "${home}"),
    ("diff", ["a", "b"], "after", "b"),
]


@pytest.mark.parametrize("name", sorted({name for name, *_ in RIGHT} - {"diff"}))  # it has a spelling of its own
def test_an_odd_spelling_that_is_right_is_read(name):
    for arguments, key, value in [row[1:] for row in RIGHT if row[0] == name]:
        values = plain_values(load_config(settings_class(name), arguments))
        assert functools.reduce(operator.getitem, key.split("."), values) == value


@pytest.mark.spread(3)
@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_shown_whatever_stands_beside_it(invoke, name):
    code, out, err = invoke(name, "=1", "~data", "data=[a", "\udcff", "--multirun", "--help", "x" * 100_000)
    assert (code, err) == (0, "") and "Keys (KEY=VALUE" in out


def test_a_folder_is_named_as_it_is_typed(invoke):
    name = "{a, b=x ü'; echo foo"
    assert invoke("submit", *NEEDED["submit"], "device=simulated", f"data={name}")[0] == 0
    assert invoke("query", "SELECT count(*) AS n FROM jobs", "format=csv", f"data={name}")[1].split() == ["n", "1"]
    assert os.listdir(invoke.place) == [name]


def test_a_backslash_is_part_of_a_files_name_and_refused_of_a_data_folders(invoke):
    """DuckDB takes it for a separator: it finds nothing below such a folder."""
    for name in ("submit", "query", "status", "fit"):
        assert r"a\b holds a backslash" in refusal(invoke, name, *NEEDED.get(name, []), r"data=a\b")
    assert not list(invoke.place.iterdir())
    assert invoke("submit", *NEEDED["submit"], "device=simulated")[0] == 0
    assert invoke("query", "SELECT 1 AS n", "format=csv", r"out=a\b.csv")[0] == 0
    assert (invoke.place / r"a\b.csv").read_text().split() == ["n", "1"]


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("export", ["source=simulated", "out={}"]),
        ("publish", ["licence=CC0", "out={}"]),
        ("query", ["SELECT 1", "out={}"]),
        ("submit", ["+arch=mlp", "n=1", "detach=true", "log.file={}"]),
        ("replay", ["n=2", "seeds=[0]", "report={}"]),
        ("benchmark", ["target=memory", "report={}"]),
        ("plan", ["model=none:none", "input=[1]", "gpus=2", "report={}"]),
        ("fit_kernels", ["out={}"]),
        ("estimate", ["method=fast", f"config={MLP}", "report={}"]),
        ("work", ["log.file={}"]),
    ],
)
def test_a_place_that_takes_no_files_is_refused_in_one_line(invoke, name, arguments):
    from warehouse.files.folder import DataFolder

    data = DataFolder.resolve("made").create()
    before = contents(invoke.place)
    folder = [] if name in ("plan", "replay") else [f"data={data.root}"]
    for place in ("/proc/x", "/proc/x/y", "/sys/x", "/dev/null/x", "/"):
        assert refusal(invoke, name, *folder, *[argument.replace("{}", place) for argument in arguments])
    assert contents(invoke.place) == before


@pytest.mark.parametrize("name", ["estimate", "largest_batch", "devices", "plan"])
def test_a_shape_that_no_tensor_has_is_one_line(invoke, name):
    (invoke.place / "own_nets.py").write_text("from torch import nn\ndef net(): return nn.Linear(4, 4)\n")
    find = {"largest_batch": ["find=largest_batch"], "devices": ["find=devices"], "plan": ["gpus=2"]}.get(name, [])
    sizes = (
        "99999999999999999999",
        "9223372036854775807,4",
        "3037000500,3037000500",
        "-1,4",
        "0,4",
        "2,-4",
        "1e30",
        "",
    )
    shapes = [f"[{one}]" for one in sizes] + ["[[2,4],[99999999999999999999]]", "{x: [99999999999999999999]}"]
    shapes += ["{x: {shape: [99999999999999999999], dtype: int64}}", "[nan,4]", "[[[]]]", "{x: {shape: [0], dtype: x}}"]
    command = "plan" if name == "plan" else "estimate"
    for shape in shapes if name == "estimate" else shapes[:5]:
        assert refusal(invoke, command, "model=own_nets:net", *find, f"input={shape}")


def test_a_model_that_ends_the_process_is_one_line(invoke):
    (invoke.place / "leaving_nets.py").write_text(
        "import sys\nfrom torch import nn\n"
        "class Odd(BaseException): pass\n"
        "def odd(): raise Odd('x')\n"
        "class Net(nn.Linear):\n"
        "    def __init__(self): super().__init__(4, 4)\n"
        "    def forward(self, x): sys.exit()\n"
    )
    (invoke.place / "leaving.py").write_text("import sys\nsys.exit()\n")
    asked = [(model, []) for model in ("sys:exit", "leaving_nets:odd", "leaving_nets:Net", "leaving:x")]
    for model, more in [
        *asked,
        ("leaving_nets:odd", ["find=largest_batch"]),
        ("leaving_nets:Net", ["estimator=llmem"]),
    ]:
        assert refusal(invoke, "estimate", f"model={model}", "input=[2,4]", *more)
