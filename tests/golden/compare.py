"""Prints each difference of two records on a line: `section, entry, key: before -> after`.

    python -m tests.golden.compare b=FOLDER [a=FOLDER] [sections=[estimates]] [tolerance=1e-9]

Start reading at `differences`. `a` is the committed record by default. The same difference of several entries is one
line. Exit code 1 where there is any.
"""

import difflib
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

from tests.golden.record import RECORDED, arguments_of

ABSENT = "(absent)"
_SHOWN, _NAMED = 200, 3  # characters of a value, entries of a line


def differences(before, after, tolerance=0.0, path=""):
    """Yield the path in a value, what stands there before, and after; `ABSENT` where nothing does.

    Args:
        before, after: What JSON holds.
        tolerance: Of numbers, relative.
        path: Of these values, in the whole.
    """
    lists = isinstance(before, list) and isinstance(after, list)
    if isinstance(before, dict) and isinstance(after, dict):
        for key in sorted(before.keys() | after.keys()):
            inner = f"{path}.{key}" if path else key
            yield from differences(before.get(key, ABSENT), after.get(key, ABSENT), tolerance, inner)
    elif lists and all(isinstance(item, str) for item in (*before, *after)):
        for kind, a, b, c, d in difflib.SequenceMatcher(a=before, b=after, autojunk=False).get_opcodes():
            if kind != "equal":
                yield f"{path}[{a}]", "\n".join(before[a:b]) or ABSENT, "\n".join(after[c:d]) or ABSENT
    elif lists and len(before) == len(after):
        for at, pair in enumerate(zip(before, after, strict=True)):
            yield from differences(*pair, tolerance, f"{path}[{at}]")
    elif not (_numbers(before, after) and math.isclose(before, after, rel_tol=tolerance)) and before != after:
        yield path, before, after


def _numbers(*values):
    return all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)


def lines(section, before, after, tolerance=0.0):
    """Yield a line for each difference of a section, where the same one of several entries is told once."""
    groups = defaultdict(list)
    for name in sorted(before.keys() & after.keys()):
        for path, old, new in differences(before[name], after[name], tolerance):
            share = f" ({new / old - 1:+.2%})" if _numbers(old, new) and old else ""
            group = re.sub(r"\[\d+\]", "[]", path), f"{_shown(old)} -> {_shown(new)}{share}"
            groups[group].append((name, path or "value"))
    for (_, change), ((name, path), *others) in groups.items():
        yield f"{section}, {name}, {path}: {change}{_more([name for name, _ in others])}"
    for word, names in (("gone", before.keys() - after.keys()), ("new", after.keys() - before.keys())):
        if names:
            first, *others = sorted(names)
            yield f"{section}, {first}: is {word}{_more(others)}"


def _more(names):
    some = "; ".join(names[:_NAMED]) + "; ..." * (len(names) > _NAMED)
    return f" (and {len(names)} more: {some})" if names else ""


def _shown(value):
    text = value if value is ABSENT else json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"


def main(words):
    """Compare two folders and return the exit code."""
    given = arguments_of(words, ("a", "b", "tolerance"))
    folders = Path(given.get("a", RECORDED)), Path(given.get("b", "build/golden"))
    recorded = [{file.stem: json.loads(file.read_text("utf-8")) for file in one.glob("*.json")} for one in folders]
    chosen = given["sections"] or sorted(recorded[0].keys() | recorded[1].keys())
    tolerance = float(given.get("tolerance", 0))
    found = [line for name in chosen for line in lines(name, *(one.get(name, {}) for one in recorded), tolerance)]
    print("\n".join([*found, f"{len(found)} differences" if found else f"equal: {', '.join(chosen)}"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
