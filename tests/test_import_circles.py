"""No module of the rooms listed here imports, by any way round, one that imports it; imports in functions count."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FREE_OF_CIRCLES = ("featurize", "learn/fastpath", "learn/analytical")
LEARN = ("cases", "workload", "traced", "step_record", "step_files", "step_store", "legacy_records", "estimators")


def modules_of(room: str) -> dict[str, Path]:
    paths = [path for path in (ROOT / room).rglob("*.py") if "__pycache__" not in path.parts]
    named = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    return named


def imports_of(path: Path, known: set[str]) -> set[str]:
    """The modules of `known` that a file imports when it runs; what only type checkers read does not count."""
    names: set[str] = set()
    waiting: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (parts & known) or {node.module}
        waiting += ast.iter_child_nodes(node)
    return names & known


def circle_of(graph: dict[str, set[str]]) -> list[str] | None:
    done: set[str] = set()

    def search(name: str, way: list[str]) -> list[str] | None:
        if name in way:
            return [*way[way.index(name) :], name]
        if name in done:
            return None
        for other in sorted(graph[name]):
            if circle := search(other, [*way, name]):
                return circle
        done.add(name)
        return None

    return next((circle for name in sorted(graph) if (circle := search(name, []))), None)


@pytest.mark.parametrize("room", FREE_OF_CIRCLES)
def test_a_room_has_no_import_circle(room):
    modules = modules_of(room)
    circle = circle_of({name: imports_of(path, set(modules)) - {name} for name, path in modules.items()})
    assert circle is None, " -> ".join(circle)


def test_cases_workloads_traces_and_stores_have_no_import_circle():
    modules = {name: path for name, path in modules_of("learn").items() if name.removeprefix("learn.") in LEARN}
    assert len(modules) == len(LEARN)
    circle = circle_of({name: imports_of(path, set(modules)) - {name} for name, path in modules.items()})
    assert circle is None, " -> ".join(circle)


def test_a_circle_is_found_by_any_way_round():
    assert circle_of({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle_of({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
