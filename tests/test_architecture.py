"""The rooms of the project and who may import whom; importing anything opens no file, driver or GPU."""

import ast
import graphlib
import subprocess
import symtable
import sys
from pathlib import Path

import pytest

from tests.source_trees import nodes_of

ROOT = Path(__file__).resolve().parent.parent

# package -> what it may import of the others, or modules of the others
ALLOWED = {
    "conf": set(),
    "warehouse": {"conf"},
    "featurize": {"conf"},
    "workers": {"conf", "featurize", "warehouse.tables.schema"},
    "learn": {"conf", "featurize", "warehouse"},
    "farm": {"conf", "featurize", "warehouse", "workers", "learn"},
}
TORCH_FREE = ("farm", "warehouse", "conf")
# room -> its folders and the modules that they import, each of which imports only those before it
LAYERS = {
    "conf": ("plain_text", "units", "errors", "device_names", "files", "children", "cli", "reports"),
    "warehouse": ("tables", "files", "reading", "explorer", "exchange"),
    "featurize": (
        "device",
        "job",
        "nets",
        "cudnn",
        "operators",
        "recording",
        "memory",
        "timing",
        "training",
        "families",
        "configs",
        "trace",
    ),
    "workers": ("telemetry", "devices", "task", "trial", "quality", "labels", "probes"),
    "learn": (
        "job",
        "rows",
        "estimators",
        "judging",
        "peers",
        "fitting",
        "estimation",
        "planning",
        "script",
        "sharing",
        "client",
        "commands",
    ),
    "farm": (
        "replaying",
        "sampling",
        "queue",
        "serving",
        "dispatch",
        "submission",
        "nights",
        "comparison",
    ),
}
COMMANDS_ONLY = {
    "learn.admit",
    "learn.estimate",
    "learn.fit",
    "learn.plan",
}  # as modules; in Python they are functions of `learn`

VAGUE_NAMES = {"found", "said", "told", "what", "it"}
CLEARLY_NAMED = (  # folders whose variables all say what they hold
    "conf",
    "farm",
    "infra",
    "warehouse",
    "workers",
    "featurize",
    "learn",
    "tests/bench",
    "tests/conf",
    "tests/contracts",
    "tests/farm",
    "tests/faults",
    "tests/gpu",
    "tests/infra",
    "tests/warehouse",
    "tests/workers",
)


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Every module that a file imports, wherever in it the import stands."""
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_point_in_one_direction(package):
    wrong = []
    for path in modules(package):
        for name in imports(path):
            room = name.partition(".")[0]
            if room in ALLOWED and room != package and not {room, name} & ALLOWED[package]:
                wrong.append(f"{module_name(path)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("package", LAYERS)
def test_folders_of_a_room_import_only_those_below_them(package):
    paths = {module_name(path): path for path in modules(package)}
    layers = [f"{package}.{layer}" for layer in LAYERS[package]]
    assert {name.rpartition(".")[0] for name in paths if name.count(".") > 1} <= set(layers), "a folder has no place"
    wrong = []
    for name, path in paths.items():
        layer = ".".join(name.split(".")[:2])
        if layer not in layers:  # a command, which nothing imports but commands
            continue
        for imported in imports_within(path, paths, without=is_for_types):
            lower = ".".join(imported.split(".")[:2])
            if lower not in (layer, package) and lower not in layers[: layers.index(layer)]:
                wrong.append(f"{name} imports {imported}")
    assert not wrong


PROBE = """
import sys
seen = []
def audit(event, args):
    if event == "open" and isinstance(args[0], str) and not args[0].endswith((".py", ".pyc", ".so")):
        mode = args[1] if isinstance(args[1], str) else "r"
        if any(letter in mode for letter in "wax+"):
            seen.append(f"open {args[0]} {mode}")
    if event in ("socket.connect", "socket.bind", "subprocess.Popen", "os.fork", "sqlite3.connect"):
        seen.append(event)
sys.addaudithook(audit)
import importlib
torch_free, others = (names.split() for names in sys.argv[1:])
for name in torch_free:
    importlib.import_module(name)
seen += [name for name in ("torch", "ray", "lightgbm") if name in sys.modules]
for name in others:
    importlib.import_module(name)
if sys.modules["torch"].cuda.is_initialized():
    seen.append("CUDA is initialised")
print("\\n".join(seen))
"""


def test_imports_open_no_file_driver_or_gpu_and_the_dispatcher_and_the_warehouse_need_neither_torch_nor_ray():
    names = {package: [module_name(path) for path in modules(package)] for package in ALLOWED}
    torch_free = [name for package in TORCH_FREE for name in names[package]]
    others = [name for package in ALLOWED if package not in TORCH_FREE for name in names[package]]
    others = [name for name in others if name not in COMMANDS_ONLY]
    command = [sys.executable, "-c", PROBE, " ".join(torch_free), " ".join(others)]
    assert subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout == "\n"


def test_nothing_imports_the_modules_that_are_commands_only():
    """Imported, they would take the place of the functions `learn.estimate` and `learn.fit`."""
    importers = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in (*ALLOWED, "infra", "tests")
        for path in modules(folder)
        if any(name in path.read_text("utf-8") for name in COMMANDS_ONLY)  # parsing all tests takes seconds
        for name in imports(path)
        if name in COMMANDS_ONLY
    ]
    assert not importers


def test_nothing_lists_the_families_but_their_folder():
    """A new family is one file in featurize/families and one in conf/arch."""
    families = {path.stem for path in modules("featurize/families") if not path.stem.startswith("_")}
    assert families == {path.stem for path in (ROOT / "conf" / "arch").glob("*.yaml")}


def is_for_types(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_within(path, known, *, without):
    """Yield the modules among `known` that a file imports, but for imports in statements that `without` is true of."""
    guards = (node for node in nodes_of(path) if without(node))
    unread = {inner for guard in guards for statement in guard.body for inner in ast.walk(statement)}
    for node in nodes_of(path):
        if node in unread:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                name = name if name in known else node.module
                if name in known:
                    yield name


@pytest.mark.parametrize("package", ALLOWED)
def test_no_modules_of_a_room_import_each_other_in_a_circle(package):
    paths = {module_name(path): path for path in modules(package)}
    # A function that is sent to another process may import its own module there.
    graph = {name: {*imports_within(path, paths, without=is_for_types)} - {name} for name, path in paths.items()}
    graphlib.TopologicalSorter(graph).prepare()  # a CycleError names the circle


def vague_names(path):
    """(line of the scope, name) of the arguments and variables whose name says nothing of what they hold.

    Fields of classes are left out: a report, a journal and `stale` of older data folders have a key `said`.
    """
    scopes = [symtable.symtable(path.read_text("utf-8"), str(path), "exec")]
    for scope in scopes:
        scopes += scope.get_children()
        for symbol in map(scope.lookup, VAGUE_NAMES.intersection(scope.get_identifiers())):
            is_variable = symbol.is_assigned() and not symbol.is_imported() and not symbol.is_namespace()
            is_field = scope.get_type() == "class" and symbol.is_annotated()
            if symbol.is_parameter() or (is_variable and not is_field):
                yield scope.get_lineno(), symbol.get_name()


@pytest.mark.parametrize("folder", CLEARLY_NAMED)
def test_variables_say_what_they_hold(folder):
    vague = [f"{path.relative_to(ROOT)}:{line} {name}" for path in modules(folder) for line, name in vague_names(path)]
    assert not vague
