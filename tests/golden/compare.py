"""Prints each difference of two records on a line: `section, entry, key: before -> after`.

    python -m tests.golden.compare a=FOLDER b=FOLDER [sections=[estimates]] [tolerance=1e-9]

Start reading at `differences`. The same difference of several entries is one line. Exit code 1 where there is any.
"""

from __future__ import annotations

import difflib
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.golden.record import RECORDED

ABSENT = "(absent)"
_SHOWN, _NAMED = 200, 3  # characters of a value, entries of a line


def differences(before: Any, after: Any, tolerance: float = 0.0, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the path in a value, what stands there before, and after; `ABSENT` where nothing does.

    Args:
        before, after: What JSON holds.
        tolerance: Of numbers, relative.
        path: Of these values, in the whole.
    """
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{path}.{key}" if path else key
            yield from differences(before.get(key, ABSENT), after.get(key, ABSENT), tolerance, inner)
    elif isinstance(before, list) and isinstance(after, list):
        if all(isinstance(item, str) for item in (*before, *after)):
            yield from _of_lines(before, after, path)
        elif len(before) == len(after):
            for at, pair in enumerate(zip(before, after, strict=True)):
                yield from differences(*pair, tolerance, f"{path}[{at}]")
        else:
            yield path, before, after
    elif not _same(before, after, tolerance):
        yield path, before, after


def _of_lines(before: list[str], after: list[str], path: str) -> Iterator[tuple[str, Any, Any]]:
    for kind, a, b, c, d in difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes():
        if kind != "equal":
            yield f"{path}[{a}]", "\n".join(before[a:b]) or ABSENT, "\n".join(after[c:d]) or ABSENT


def _same(before: Any, after: Any, tolerance: float) -> bool:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (before, after))
    return math.isclose(before, after, rel_tol=tolerance) if numbers else before == after


def lines(section: str, before: dict[str, Any], after: dict[str, Any], tolerance: float = 0.0) -> Iterator[str]:
    """Yield a line for each difference of a section, where the same one of several entries is told once."""
    groups: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name in sorted(before.keys() & after.keys()):
        for path, old, new in differences(before[name], after[name], tolerance):
            shown = f"{_shown(old)} -> {_shown(new)}{_share(old, new)}"
            groups[re.sub(r"\[\d+\]", "[]", path), shown].append((name, path or "value"))
    for (_, shown), places in groups.items():
        (name, path), *others = places
        yield f"{section}, {name}, {path}: {shown}{_more([name for name, _ in others])}"
    for word, names in (("gone", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        if names:
            first, *others = sorted(names)
            yield f"{section}, {first}: is {word}{_more(others)}"


def _more(names: list[str]) -> str:
    shown = "; ".join(dict.fromkeys(names[:_NAMED])) + "; ..." * (len(names) > _NAMED)
    return f" (and {len(names)} more: {shown})" if names else ""


def _shown(value: Any) -> str:
    text = value if value is ABSENT else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def _share(before: Any, after: Any) -> str:
    if all(isinstance(value, int | float) for value in (before, after)) and before:
        return f" ({after / before - 1:+.2%})"
    return ""


def main(arguments: list[str]) -> int:
    """Compare two folders and return the exit code: 1 where they differ."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if given.keys() - {"a", "b", "sections", "tolerance"} or "b" not in given:
        print("error: b=FOLDER, a=FOLDER (default: the committed record), sections=[...], tolerance=0 may be given")
        return 2
    folders = Path(given.get("a", RECORDED)), Path(given["b"])
    files = {file.stem for folder in folders for file in folder.glob("*.json")}
    chosen = given["sections"].strip("[]").split(",") if "sections" in given else sorted(files)
    count = 0
    for section in chosen:
        read = [folder / f"{section}.json" for folder in folders]
        if missing := [str(file) for file in read if not file.is_file()]:
            print(f"{section}: not compared, there is no {' and no '.join(missing)}")
            count += "sections" in given
            continue
        values = [json.loads(file.read_text(encoding="utf-8")) for file in read]
        for line in lines(section, *values, float(given.get("tolerance", 0))):
            count += 1
            print(line)
    print(f"{count} differences" if count else f"equal: {', '.join(chosen)}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
