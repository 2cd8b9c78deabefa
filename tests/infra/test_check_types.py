"""The ratchet of type errors: a package may only have fewer, a strictly checked module none."""

import json
import tomllib

import pytest

from infra import check_types

OUTPUT = """\
farm/a.py:3: error: Incompatible return value type  [return-value]
farm/a.py:3: note: Left operand is of type "int | None"
learn/__init__.py:7: error: Function is missing a type annotation  [no-untyped-def]
learn/evaluation/b.py:9:4: error: Item "None" has no attribute "x"  [union-attr]
"""


def test_errors_are_counted_by_package_and_notes_are_not():
    counts = check_types.count_by_package(check_types.parse_problems(OUTPUT))
    assert (counts["farm"], counts["learn"], counts["conf"]) == (1, 2, 0)


def test_a_package_fails_when_its_number_rose_and_only_then():
    problems = check_types.parse_problems(OUTPUT)
    assert check_types.failures(problems, {"farm": 1, "learn": 2}, []) == []
    lines = check_types.failures(problems, {"farm": 1, "learn": 1}, [])
    assert lines[-1] == "learn: 2 type errors, 1 allowed; the number may only fall"
    assert any(line.startswith("learn/evaluation/b.py:9") for line in lines)
    assert not any(line.startswith("farm") for line in lines)


@pytest.mark.parametrize("pattern", ["learn", "learn.evaluation.*", "farm.*"])
def test_an_error_in_a_strictly_checked_module_fails_whatever_is_allowed(pattern):
    problems = check_types.parse_problems(OUTPUT)
    lines = check_types.failures(problems, {"farm": 9, "learn": 9}, [pattern])
    assert lines[-1] == "type errors in strictly checked modules: 1; none is allowed"


def test_a_package_pattern_covers_the_package_itself():
    problems = check_types.parse_problems(OUTPUT)
    assert len(check_types.failures(problems, {"farm": 9, "learn": 9}, ["learn.*"])) == 3


def test_the_committed_numbers_name_every_package_and_the_configuration_every_strict_module():
    allowed = json.loads(check_types.ALLOWED_FILE.read_text())
    assert sorted(allowed) == sorted(check_types.PACKAGES)
    pyproject = (check_types.ROOT / "pyproject.toml").read_text()
    assert sorted(tomllib.loads(pyproject)["tool"]["mypy"]["files"]) == sorted(check_types.PACKAGES)
    assert "farm.dispatch.executors" in check_types.strict_patterns(pyproject)


def run(monkeypatch, tmp_path, allowed, *arguments):
    numbers = tmp_path / "a'; echo foo" / "type_errors.json"
    numbers.parent.mkdir(exist_ok=True)
    numbers.write_text(json.dumps({**dict.fromkeys(check_types.PACKAGES, 0), **allowed}))
    monkeypatch.setattr(check_types, "ALLOWED_FILE", numbers)
    monkeypatch.setattr(check_types, "run_mypy", lambda: OUTPUT.replace("learn/__init__", "learn/other"))
    return check_types.main(list(arguments)), json.loads(numbers.read_text())


def test_write_lowers_the_numbers_and_never_raises_one(monkeypatch, tmp_path):
    code, numbers = run(monkeypatch, tmp_path, {"farm": 5, "learn": 2}, "--write")
    assert (code, numbers["farm"], numbers["learn"]) == (0, 1, 2)
    code, numbers = run(monkeypatch, tmp_path, {"farm": 5, "learn": 1}, "--write")
    assert (code, numbers["farm"], numbers["learn"]) == (1, 5, 1)


def test_a_lower_count_asks_for_lower_numbers(monkeypatch, tmp_path, capsys):
    code, numbers = run(monkeypatch, tmp_path, {"farm": 5, "learn": 2})
    assert (code, numbers["farm"]) == (0, 5)
    assert "farm 5 -> 1" in capsys.readouterr().out
