"""No room loads a pickle or runs code that data brought: an audit of the source, exceptions listed with reasons."""

import ast
from pathlib import Path

import pytest

from tests.source_trees import nodes_of, tree_of

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("conf", "warehouse", "featurize", "workers", "learn", "farm", "infra")
# Modules whose loading runs what a file says; the standard library's shelve and dbm are pickles, too.
PICKLES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
WRITE_PICKLES = {"Pickler", "PicklingError"}  # of pickle: a hash of what is written, which nobody reads
RUN = {"eval", "exec", "compile", "__import__"}
IMPORTS = {"import_module", "__import__", "find_loader", "run_module", "run_path", "exec_module", "load_module"}

# Who may import by a name, and why the name is no data. Each entry is one function of one file.
LOADERS = {
    ("conf/children/__main__.py", ""): "a preparation that our own code names, in a process of its own",
    ("conf/children/running.py", "serve"): "modules that our own code names, over a socket that only it inherits",
    ("conf/children/running.py", "_run"): "a function that our own code names, over a socket that only it inherits",
    ("conf/cli/commands.py", "settings_class"): "a literal of the table of commands",
    ("farm/__init__.py", ""): "a literal: conf/cli/own_packages.py, before another package is imported",
    ("learn/__init__.py", ""): "a literal: conf/cli/own_packages.py, before another package is imported",
    ("learn/__init__.py", "__getattr__"): "names of the table _LATER; others raise first",
    ("warehouse/__init__.py", ""): "a literal: conf/cli/own_packages.py, before another package is imported",
    ("infra/gpufarm/__main__.py", "main"): "names of the table COMMANDS; others raise first",
    ("infra/gpufarm/__main__.py", "_own_packages"): "a literal: conf/cli/own_packages.py, before conf can be imported",
    ("learn/estimators/protocol.py", "get_estimator"): "names of the table ESTIMATORS; others raise first",
    ("learn/commands/benchmark_rows.py", "answer"): "a job of this process's own, its name from ESTIMATORS",
    ("learn/rows/processes.py", "serve"): "names that our own call of `in_processes` holds, in a process of its own",
    ("learn/script/command_line.py", "_torchrun"): "imports nothing: torchrun's option of that name, which is refused",
    ("learn/script/run.py", "_execute"): "the script that the user typed behind --, in a process of its own",
    ("featurize/trace/light_imports.py", "_real_module"): "a literal: torch._dynamo, whose place the stand-in takes",
    ("featurize/trace/light_imports.py", "find_spec"): "parts of torch._dynamo, when torch imports them",
    ("workers/probes/children.py", "measure"): "names of the table PROBES; others raise first",
    ("workers/probes/children.py", "write_rows"): "a probe's function that our own code names, in a process of its own",
    ("workers/telemetry/sensors.py", "make_sensors"): "names of the table SENSORS",
    ("workers/devices/__init__.py", "make_device"): "names of the table of backends",
    ("featurize/families/__init__.py", "get_family"): "names of files of our own folder; others raise first",
    ("featurize/families/zoo.py", "_load"): "behind `code_names.library_problem`: the user's names, libraries' models",
    ("featurize/job/code_names.py", "_download"): "a literal: timm",
    ("featurize/training/training_step.py", "preload"): "literals: what the first step imports",
    ("featurize/nets/vision.py", "import_library"): "the libraries' models, behind `code_names.library_problem`",
    ("featurize/nets/vision.py", "load_named"): "model=MODULE:FACTORY that the user typed; zoo's, behind its own check",
    ("featurize/nets/vision.py", "mend_torchvision"): "a literal: torchvision",
}
SHELLS = {"farm/grow.py": "notify=COMMAND that the user typed; what it gets to know is its standard input"}


@pytest.fixture(autouse=True, scope="module")
def _forgotten_trees():
    """Millions of objects that the collector would walk through in all later tests; test_architecture comes before."""
    yield
    tree_of.cache_clear()
    nodes_of.cache_clear()


def sources():
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def name_of(node):
    """The last name of what is called: `load` of `torch.load`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def owner_of(node):
    return name_of(node.value) if isinstance(node, ast.Attribute) else ""


def keyword(call, name):
    return next((word.value for word in call.keywords if word.arg == name), None)


def is_literal(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def imported(nodes):
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((alias.name.partition(".")[0], node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = {alias.name for alias in node.names}
            if node.module != "pickle" or not names <= WRITE_PICKLES:
                yield node.module.partition(".")[0], node.lineno


def problem_of_call(call):
    """Why a call may run what data says, or None."""
    name, owner = name_of(call.func), owner_of(call.func)
    if isinstance(call.func, ast.Name) and name in RUN:
        return f"{name}()"
    if name == "load" and owner == "torch" and not is_literal(keyword(call, "weights_only"), True):
        return "torch.load without weights_only=True"
    is_safe = name == "load" and name_of(keyword(call, "Loader")) == "SafeLoader"
    if name in ("load", "unsafe_load", "full_load", "load_all", "unsafe_load_all") and owner == "yaml" and not is_safe:
        return "yaml other than safe_load"
    allow = keyword(call, "allow_pickle")
    if allow is not None and not is_literal(allow, False):
        return "allow_pickle"
    if name == "load" and owner in ("np", "numpy") and allow is None:
        return "numpy.load that does not say allow_pickle=False"
    if name in ("read_pickle", "to_pickle", "load_state_dict_from_url", "hub") or owner == "hub":
        return name
    if any(word.arg == "trust_remote_code" for word in call.keywords):
        return "trust_remote_code"
    if name in ("system", "popen") and owner == "os":
        return f"os.{name}"
    if any(word.arg == "shell" and not is_literal(word.value, False) for word in call.keywords):
        return "a shell"
    return None


def findings(nodes):
    """(line, what) of everything that could run what data says, imports by name aside."""
    found_lines = [(line, f"imports {module}") for module, line in imported(nodes) if module in PICKLES]
    for node in nodes:
        if isinstance(node, ast.Call) and (problem := problem_of_call(node)) is not None:
            found_lines.append((node.lineno, problem))
    return found_lines


def loaders(tree):
    """(function, line) of every use of a name that imports by name, called or handed on."""
    loader_lines = []

    def walk(node, function):
        for child in ast.iter_child_nodes(node):
            inside = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            by_name = name_of(child) in IMPORTS or (name_of(child), owner_of(child)) == ("resolve_name", "pkgutil")
            if isinstance(child, ast.Attribute | ast.Name) and by_name:
                loader_lines.append((inside, child.lineno))
            walk(child, inside)

    walk(tree, "")
    return loader_lines


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_loads_pickles_or_runs_texts(room):
    wrong = []
    for path in sorted((ROOT / room).rglob("*.py")):
        for line, finding in findings(nodes_of(path)):
            if finding == "a shell" and str(path.relative_to(ROOT)) in SHELLS:
                continue
            wrong.append(f"{path.relative_to(ROOT)}:{line}: {finding}")
    assert not wrong


def test_imports_by_name_are_those_of_the_list_and_the_list_has_no_others():
    importers = {}
    for path in sources():
        text = path.read_text("utf-8")
        if not any(name in text for name in (*IMPORTS, "resolve_name")):  # walking all trees takes seconds
            continue
        for function, line in loaders(tree_of(path)):
            importers.setdefault((str(path.relative_to(ROOT)), function), line)
    assert {
        f"{path}:{line} {function}" for (path, function), line in importers.items() if (path, function) not in LOADERS
    } == set()
    assert set(LOADERS) - set(importers) == set()


def test_configs_become_code_names_only_where_the_user_speaks():
    """Who grants a config's names of code: what is typed, what the user trusts, tasks that the user submitted."""
    granting = {"CodeName", "named_by_user", "config_of_user", "config_with_marks"}
    callers = set()
    for path in sources():
        for node in nodes_of(path):
            if isinstance(node, ast.Call) and name_of(node.func) in granting:
                callers.add(str(path.relative_to(ROOT)))
    assert callers == {
        "featurize/job/code_names.py",
        "featurize/configs/trial.py",
        "farm/submission/model_check.py",
        "featurize/configs/space.py",
        "workers/trial/body.py",
        "learn/commands/estimate.py",
        "learn/job/training_job.py",
    }


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from joblib import load",
        "from pickle import Pickler, loads",
        "yaml.load(text, Loader=Loader)",
        "import torch\ntorch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "numpy.load(path, allow_pickle=True)",
        "eval(text)",
        "exec(text)",
        "yaml.load(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_the_audit_finds_what_it_is_for(code):
    assert findings([*ast.walk(ast.parse(code))])
