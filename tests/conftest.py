"""Settings of every test process; imported before torch, NumPy and LightGBM are."""

import atexit
import contextlib
import gc
import importlib
import json
import os
import pickle
import platform
import re
import signal
import sys
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.surroundings import run_command

# Several test processes share the cores: with a pool of threads each, a fifth of the time goes to threads that spin.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Trials choose their threads themselves: where others have the cores, these would spin until all of them had a turn.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# What one test replaces in this project's code must not answer for another: tests of the cache name a folder of theirs.
os.environ["GPUFARM_CACHE"] = "off"

# Hundreds of processes are started: without compiled files each would compile the project anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# What tests write is gone when they end, and what a process killed by a test has written stays without it: waiting for
# the disk, some milliseconds a file, shows nothing. Tests of a disk that is full put a failing one in this place.
os.fsync = os.fstat

# Collection keeps what it makes, and the collector would walk through all of it again and again.
gc.disable()

# Under `nohup` and in a background job of a script, Ctrl-C is ignored, also by the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


# Imports and calls of a module of tests that start processes, Ray or sockets, fit models, compile them, or read
# libraries of them, which takes seconds: `make test-quick` leaves it out, unless the command line names its file.
NOT_QUICK = re.compile(
    r"^\s*(import|from) (subprocess|multiprocessing|ray|socket|real_ranks|accelerate|transformers|timm)\b|"
    r"[\[(]sys\.executable|\bos\.fork\(|\btransformers\.\w+\(|\bcompile=True|\btorch\.compile\(|"
    r"\b(\w*Serv(er|ice)|TestClient|make_executor|\w*estimate_script|stand_in_for_cudnn|"
    r"documented_commands|(?<!def )(fit|fitted)|make_estimator)\(",
    re.MULTILINE,
)
# And those that do so through what they call: a worker's trial server, an interpreter, a command, a library's models.
ALSO_NOT_QUICK = {
    "test_benchmark.py",
    "test_collocating.py",
    "test_compact.py",
    "test_compare.py",
    "test_devices.py",
    "test_explorer.py",
    "test_families.py",
    "test_features.py",
    "test_full_disk.py",
    "test_groups.py",
    "test_hostile_arguments.py",
    "test_hostile_trials.py",
    "test_model_check.py",
    "test_prepared.py",
    "test_profiling.py",
    "test_readme.py",
    "test_script_launchers.py",
    "test_slurm.py",
    "test_submit.py",
    "test_telemetry_nvml_gpm.py",
    "test_worker.py",
}
STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "socket.connect", "socket.bind")  # events of `sys.audit`
_of_a_named_file = False  # the test that runs
QUICK_CASES = 4  # of so many cases of a test, a quick run takes one


# Files that share what starts or is imported for seconds, once a session: one process of `make test` runs all of a
# group.
TOGETHER = {
    f"tests/{folder}/test_{name}.py": f"tests/{folder}/{group}"
    for folder, group, names in (
        ("farm", "services", "explorer explorer_browser kubernetes serving slurm"),
        ("featurize", "real ranks", "data_parallel flat_ranks float8 pipelines sharded_ranks"),
        ("featurize", "real ranks", "compiled compiled_time"),  # real ranks import the compiler, too
        ("featurize", "libraries", "families family_networks family_zoo features"),
        ("featurize", "libraries", "published_models quantized step_mix training"),
        ("featurize", "libraries", "training_settings"),
        ("learn", "scripts", "script_deepspeed script_failures script_kinds script_ranks"),
        ("workers", "workers", "groups hostile_trials prepared profiling ranks worker"),
    )
    for name in names.split()
}
TOGETHER["tests/contracts/test_executor_contract.py"] = "tests/workers/workers"  # trial servers
TOGETHER["tests/farm/test_served_adapters.py"] = "tests/featurize/libraries"
TOGETHER["tests/test_no_code_from_data.py"] = "tests/test_architecture.py"  # both parse all sources


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share the tests a file at a time, as `--dist loadfile` does, but for those that stay together.

    Each process has files of one folder as long as there are: it has imported their libraries, and started their
    servers, which together take a process longer than many a file.
    """
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return TOGETHER.get(file, file)

        def _assign_work_unit(self, node: Any) -> None:
            folders = {
                process: os.path.dirname(next(reversed(files)))
                for process, files in self.assigned_work.items()
                if files
            }

            def distance(file: str) -> tuple[bool, bool]:
                folder = os.path.dirname(file)
                return folder != folders.get(node), folder in folders.values()

            self.workqueue.move_to_end(min(self.workqueue, key=distance), last=False)
            super()._assign_work_unit(node)

    return Scheduling(config, log) if config.option.dist == "loadfile" else None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="run what is done in milliseconds, some cases of each test")


def pytest_configure(config: pytest.Config) -> None:
    """Refuse whatever a quick run is said not to start, in the process that runs the tests."""
    if config.getoption("quick") and not getattr(config.option, "numprocesses", None):
        platform.platform()  # starts `uname -p` when it is first asked, which xdist does as its session starts
        sys.addaudithook(_refuse_starts)


def _named(config: pytest.Config) -> set[Path]:
    """The files, not folders, that are named on the command line."""
    return {path for path in (Path(one.partition("::")[0]).resolve() for one in config.args) if path.is_file()}


def _refuse_starts(event: str, _arguments: tuple) -> None:
    if event in STARTS and not _of_a_named_file:
        raise RuntimeError(f"a quick test starts something ({event}): its module belongs to ALSO_NOT_QUICK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global _of_a_named_file
    _of_a_named_file = item.path in _named(item.config)
    return (yield)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("quick") or collection_path.suffix != ".py" or collection_path in _named(config):
        return None
    starts = collection_path.name in ALSO_NOT_QUICK or NOT_QUICK.search(collection_path.read_text("utf-8"))
    return True if starts else None


def pytest_collection(session: pytest.Session) -> None:
    """Where several processes collect all tests, each one prepares another part of the modules first, and finds the
    others' in pytest's cache: rewriting assertions is half of the collection."""
    own = getattr(session.config, "workerinput", None)
    if own is None or session.config.args != session.config.getini("testpaths"):
        return
    number, count = int(own["workerid"].removeprefix("gw")), own["workercount"]
    root = session.config.rootpath
    modules = sorted((root / "tests").rglob("test_*.py"))
    for path in modules[number::count]:
        with contextlib.suppress(Exception):  # the collection says so
            importlib.import_module(".".join(path.relative_to(root).with_suffix("").parts))


def pytest_collection_finish() -> None:
    """Keep the collector from walking, again and again, through the libraries and tests that stay until the end."""
    _compose_once()
    gc.freeze()
    atexit.register(gc.unfreeze)  # after pytest's own collections; extensions report what stays frozen as leaked
    gc.enable()
    gc.set_threshold(20_000, 20, 20)


def _compose_once() -> None:
    """Have Hydra compose the same defaults and choices once a process, and copy them for the next test: it takes 50 ms,
    and a thousand command lines of the tests compose the defaults of few commands."""
    from conf.cli import command_line

    compose, composed = command_line._compose, dict[tuple[Any, ...], bytes]()

    def compose_or_copy(settings: type, choices: Sequence[str]) -> Any:
        key = settings, *choices
        if key not in composed:
            composed[key] = pickle.dumps(compose(settings, choices))
        return pickle.loads(composed[key])

    command_line._compose = compose_or_copy


# Where the code lies whose properties are tested on random values.
PROPERTIES = ("/conf/plain_text.py", "/farm/queue/", "/featurize/memory/", "/warehouse/explorer/")


def _draw_constants_of_few_modules() -> None:
    """Have Hypothesis take numbers and texts worth trying from the code under test alone: parsing the project's other
    modules for them takes each process four seconds in a fresh clone."""
    from hypothesis.internal.conjecture import providers

    providers.is_local_module_file = lambda file: any(part in file for part in PROPERTIES)


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark the cases of a test with `spread(n)` as `wide`, but for about each n-th, at least one.

    `make test` runs these few, `make test-wide` the others. They are drawn by their names, so that no kind of case is
    always among the others where a test has several kinds; `spread(n, kind)` draws from each kind by itself. A quick
    run spreads the cases of all tests.
    """
    if "hypothesis" in sys.modules:
        _draw_constants_of_few_modules()
    cases: dict[tuple[Any, ...], list[pytest.Item]] = defaultdict(list)
    quick = config.getoption("quick")
    for item in items:
        if quick and "[" in item.nodeid:
            item.add_marker(pytest.mark.spread(QUICK_CASES), append=False)
        if (mark := item.get_closest_marker("spread")) is not None:
            cases[item.nodeid.partition("[")[0], *mark.args].append(item)
    for (_, n, *_), of_test in cases.items():
        drawn = {item.nodeid: zlib.crc32(item.nodeid.encode()) for item in of_test}
        kept = sorted(drawn, key=drawn.__getitem__)[: -(-len(drawn) // n)]
        for item in of_test:
            if item.nodeid not in kept:
                item.add_marker(pytest.mark.wide)


_module_of_traces: Any = None  # the last test's module, if it is marked `shares_traces`


@pytest.fixture(autouse=True)
def no_answers_of_other_tests(request: pytest.FixtureRequest) -> None:
    """Forget the answers and traces of earlier tests, which may have replaced parts of what makes them. Traces stay
    from test to test within a module that is marked `shares_traces`."""
    global _module_of_traces
    module = request.module if request.node.get_closest_marker("shares_traces") else None
    forgotten = ["learn.estimation.answers"]
    if module is None or module is not _module_of_traces:
        forgotten.append("featurize.trace.trace_cache")
    _module_of_traces = module
    for name in forgotten:
        if (cache := sys.modules.get(name)) is not None:
            cache.clear()


# Modules whose tests open the views file `warehouse.duckdb`, or make folders that cannot be written to.
WITH_VIEWS_FILE = ("compact", "folder", "full_disk", "read_only", "reader_cannot_write", "stale", "views")


@pytest.fixture(scope="module")
def module_patch() -> Iterator[pytest.MonkeyPatch]:
    """Patches that last for all tests of a module."""
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(autouse=True, scope="module")
def no_views_for_other_clients(request: pytest.FixtureRequest, module_patch: pytest.MonkeyPatch) -> None:
    """Leave the views file out of data folders, except in these modules and in tests of faults: writing it takes longer
    than most tests."""
    if request.path.parent.name != "faults" and request.path.stem.removeprefix("test_") not in WITH_VIEWS_FILE:
        module_patch.setattr("warehouse.files.views.refresh", lambda folder: None)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """An empty folder of this user alone, with a hostile name."""
    folder = tmp_path / "a'; echo foo"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def outcome(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process; return its exit code and what it prints on both streams."""

    def run(name: str, *arguments: str) -> tuple[int, str, str]:
        code = run_command(name, *arguments)
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def shown(outcome: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run a command that ends well, and return what it prints."""

    def printed(*command: str) -> str:
        code, out, err = outcome(*command)
        assert code == 0, err
        return out

    return printed


@pytest.fixture
def answer(shown: Callable[..., str]) -> Callable[..., Any]:
    """Run such a command and return its answer, from JSON."""
    return lambda *command: json.loads(shown(*command, "format=json"))


@pytest.fixture
def refused(outcome: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Run a command that refuses its arguments, and return the one line that says so."""

    def line(*command: str) -> str:
        code, out, err = outcome(*command)
        assert (code, out, err.count("\n")) == (2, "", 1) and err.startswith("error: "), out + err
        return err

    return line


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what a release of torch before the marked one lacks, `needs_torch("2.11", "RMS norm is one kernel")`, and
    modes of several GPUs that are refused under the installed one, `needs_mode("pp")`."""
    for mark in item.iter_markers("needs_torch"):
        from conf.errors import EnvironmentProblem
        from featurize.operators.torch_releases import require_torch

        oldest, reason = mark.args
        try:
            require_torch(oldest, reason)
        except EnvironmentProblem as error:
            pytest.skip(str(error))
    for mark in item.iter_markers("needs_mode"):
        from featurize.operators.torch_releases import refused_modes

        if (why := refused_modes().get(mark.args[0])) is not None:
            pytest.skip(why)
