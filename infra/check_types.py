"""Runs mypy over the packages and fails where a package has more errors than infra/type_errors.json allows.

`--write` lowers the numbers to what mypy finds now; they never rise. Start reading at `main`.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
ALLOWED_FILE = ROOT / "infra" / "type_errors.json"
PACKAGES = ("conf", "farm", "featurize", "learn", "warehouse", "workers")

_SHOWN = 20  # errors of a package that has more than it may
_ERROR = re.compile(r"^(?P<path>(?P<package>\w+)/.*?\.py):\d+(:\d+)?: error: ")


class TypeProblem(NamedTuple):
    """One error of mypy: the package and module where it stands, and mypy's line."""

    package: str
    module: str
    line: str


def parse_problems(output: str) -> list[TypeProblem]:
    """Return the errors in mypy's output; notes belong to no count."""
    problems = []
    for line in output.splitlines():
        if match := _ERROR.match(line):
            parts = Path(match["path"]).with_suffix("").parts
            module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            problems.append(TypeProblem(match["package"], module, line))
    return problems


def count_by_package(problems: Iterable[TypeProblem]) -> dict[str, int]:
    """Return the number of errors of every package, zeros included."""
    counts = dict.fromkeys(PACKAGES, 0)
    for problem in problems:
        counts[problem.package] += 1
    return counts


def strict_patterns(pyproject: str) -> list[str]:
    """Return the module patterns that pyproject.toml checks strictly: those must have no error at all."""
    overrides = tomllib.loads(pyproject)["tool"]["mypy"].get("overrides", [])
    return [name for part in overrides if part.get("disallow_untyped_defs") for name in part["module"]]


def _is_strict(module: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(module, name) or name == f"{module}.*" for name in patterns)


def failures(problems: Iterable[TypeProblem], allowed: Mapping[str, int], patterns: Iterable[str]) -> list[str]:
    """Return lines that say which package rose or which strict module has an error; none where all is well."""
    problems, patterns = list(problems), list(patterns)
    strict = [problem.line for problem in problems if _is_strict(problem.module, patterns)]
    lines = [*strict, f"type errors in strictly checked modules: {len(strict)}; none is allowed"] if strict else []
    for package, count in count_by_package(problems).items():
        if count > allowed.get(package, 0):
            own = [problem.line for problem in problems if problem.package == package and problem.line not in strict]
            lines += own[:_SHOWN]
            if len(own) > _SHOWN:
                lines.append(f"... and {len(own) - _SHOWN} more: python -m mypy | grep ^{package}/")
            lines.append(f"{package}: {count} type errors, {allowed.get(package, 0)} allowed; the number may only fall")
    return lines


def run_mypy() -> str:
    """Return mypy's output over all packages; raises SystemExit where mypy itself fails."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "--no-pretty", "--no-color-output"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if done.returncode not in (0, 1) or (done.returncode == 1 and not parse_problems(done.stdout)):
        raise SystemExit(f"error: mypy could not check the types\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def main(arguments: list[str] | None = None) -> int:
    """Check the types, or lower the allowed numbers; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="lower the allowed numbers to what mypy finds now")
    options = parser.parse_args(arguments)
    problems = parse_problems(run_mypy())
    counts = count_by_package(problems)
    allowed = json.loads(ALLOWED_FILE.read_text(encoding="utf-8"))
    lines = failures(problems, allowed, strict_patterns((ROOT / "pyproject.toml").read_text(encoding="utf-8")))
    if lines:
        print("\n".join(lines), file=sys.stderr)
        return 1
    fallen = [
        f"{package} {allowed[package]} -> {count}" for package, count in counts.items() if count < allowed[package]
    ]
    if fallen and options.write:
        ALLOWED_FILE.write_text(json.dumps(counts, indent=2) + "\n", encoding="utf-8")
        print(f"{ALLOWED_FILE.name} lowered: {', '.join(fallen)}")
    elif fallen:
        print(f"fewer type errors than allowed ({', '.join(fallen)}): run python infra/check_types.py --write")
    else:
        print(f"types: {sum(counts.values())} errors, as many as allowed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
