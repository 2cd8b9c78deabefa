"""The rooms of the project and who may import whom; importing anything opens no file, driver or GPU."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# package -> what it may import of the others, or modules of the others
ALLOWED = {
    "conf": set(),
    "gpufarm": {"conf"},
    "warehouse": {"conf"},
    "featurize": {"conf"},
    "workers": {"conf", "featurize", "warehouse.schema"},
    "learn": {"conf", "featurize", "warehouse", "gpufarm.own_packages"},
    "farm": {"conf", "featurize", "warehouse", "workers", "learn", "gpufarm.own_packages"},
}
TORCH_FREE = ("farm", "warehouse", "conf", "gpufarm")
COMMANDS_ONLY = {"learn.estimate", "learn.fit"}  # as modules; in Python they are functions of `learn`


def modules(package):
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path):
    """Every module that a file imports, wherever in it the import stands."""
    for node in ast.walk(ast.parse(path.read_text())):
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
for name in sys.argv[2:]:
    importlib.import_module(name)
if sys.argv[1] == "torch-free":
    seen += [name for name in ("torch", "ray", "lightgbm") if name in sys.modules]
elif "torch" in sys.modules and sys.modules["torch"].cuda.is_initialized():
    seen.append("CUDA is initialised")
print("\\n".join(seen))
"""


def probe(kind, names):
    done = subprocess.run([sys.executable, "-c", PROBE, kind, *names], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1] if done.stdout.strip() else []


def test_the_dispatcher_and_the_warehouse_import_neither_torch_nor_ray():
    names = [module_name(path) for package in TORCH_FREE for path in modules(package)]
    assert not probe("torch-free", names)


@pytest.mark.parametrize("package", ALLOWED)
def test_importing_a_module_opens_no_file_driver_or_gpu(package):
    assert not probe("any", [name for path in modules(package) if (name := module_name(path)) not in COMMANDS_ONLY])


def test_nothing_imports_the_modules_that_are_commands_only():
    """Imported, they would take the place of the functions `learn.estimate` and `learn.fit`."""
    importers = [
        f"{path.relative_to(ROOT)} imports {name}"
        for folder in (*ALLOWED, "infra", "tests")
        for path in modules(folder)
        for name in imports(path)
        if name in COMMANDS_ONLY
    ]
    assert not importers


def test_every_module_says_what_it_is_for():
    missing = []
    for package in ALLOWED:
        for path in modules(package):
            docstring = ast.get_docstring(ast.parse(path.read_text()))
            if not docstring:
                missing.append(module_name(path))
    assert not missing


def test_nothing_lists_the_families_but_their_folder():
    """A new family is one file in featurize/families and one in conf/arch."""
    families = {path.stem for path in modules("featurize/families") if not path.stem.startswith("_")}
    spaces = {path.stem for path in (ROOT / "conf" / "arch").glob("*.yaml")}
    assert families == spaces
