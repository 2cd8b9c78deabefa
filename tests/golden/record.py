"""Records what this checkout answers, so that a later one can be compared with it, entry by entry.

    python -m tests.golden.record out=FOLDER [sections=[estimates,help]] [published=FOLDER]
    python -m tests.golden.compare a=FOLDER b=FOLDER

Start reading at `SECTIONS`. A section is a function that yields names and values; a value that is a function is called,
and what it raises is recorded. Each section runs in a process and in an empty folder of its own, and becomes one JSON
file with an entry a line. `recorded/` beside this file holds the committed record.
"""

from __future__ import annotations

import datetime
import importlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RECORDED = Path(__file__).with_name("recorded")
SECTIONS = {
    "libraries": "tests.golden.record:versions",
    "estimates": "tests.golden.estimates:estimates",
    "fast": "tests.golden.estimates:fast_estimates",
    "allocator": "tests.golden.estimates:allocator_events",
    "predictions": "tests.golden.learned:predictions",
    "benchmark": "tests.golden.learned:benchmarks",
    "published": "tests.golden.learned:published",  # nothing without published=
    "help": "tests.golden.commands:help_texts",
    "documented": "tests.golden.commands:documented",
    "hostile": "tests.golden.commands:hostile",
    "nights": "tests.golden.data:nights",
    "comparisons": "tests.golden.data:comparisons",
    "publication": "tests.golden.data:publication",
}
DIGITS = 10
_SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "120", "TZ": "UTC", "PYTHONHASHSEED": "0"}
_TIMES = re.compile(r"(^|_)(seconds|wall_s|overhead_s|at)$")  # keys whose values are of the clock
_DATE = "|".join(str(datetime.date.today() + datetime.timedelta(days=days)) for days in (-1, 0, 1))


def versions() -> Iterator[tuple[str, str | None]]:
    """Yield the releases that the other sections depend on."""
    from conf.identity import version_of

    for name in (
        "torch",
        "torchvision",
        "timm",
        "transformers",
        "numpy",
        "lightgbm",
        "scikit-learn",
        "duckdb",
        "pyarrow",
    ):
        yield name, version_of(name)


def _replacements(place: Path) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield what differs between two runs of the same code, and what stands for it in a record."""
    yield re.compile(re.escape(str(place))), "PLACE"
    yield re.compile(re.escape(str(ROOT))), "ROOT"
    yield re.compile(re.escape(sys.prefix)), "VENV"
    yield re.compile(rf"({_DATE})[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z| UTC)?"), "TIME"
    yield re.compile(rf"({_DATE})(\.\d+)?"), "TODAY"
    yield re.compile(r"\b\d\d:\d\d:\d\d\b"), "TIME"
    yield re.compile(r"[^\n]*\d/\d+( steps,|  )[^\n]*\n"), ""  # of a bar, which moves by the clock
    yield re.compile(r"\b(canary|grow)-[0-9a-f]{8}"), r"\1-TOKEN"
    yield re.compile(r"\bmerged-\d{8}T\d{6}-[0-9a-f]{12}"), "merged-TOKEN"


def steady(value: Any, place: Path) -> Any:
    """Return a value as JSON that is the same whenever and wherever the same code gives it.

    Args:
        value: What JSON holds, NumPy's numbers, tuples and NaN. A text of several lines becomes a list.
        place: The folder that the section runs in.
    """
    if isinstance(value, Mapping):
        return {
            str(key): "TIME" if item is not None and _TIMES.search(str(key)) else steady(item, place)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [steady(item, place) for item in value]
    if hasattr(value, "tolist"):
        return steady(value.tolist(), place)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    text = str(value)
    for pattern, name in _replacements(place):
        text = pattern.sub(name, text)
    return text.split("\n") if "\n" in text else text


def entries(section: str, place: Path, *, published: str | None = None) -> Iterator[tuple[str, Any]]:
    """Yield each entry of a section: its name, and its value as JSON."""
    from conf.plain_text import exception_line

    module, _, function = SECTIONS[section].partition(":")
    try:
        found = getattr(importlib.import_module(module), function)(*([published] if section == "published" else []))
        for name, value in found:
            try:
                value = value() if callable(value) else value
            except Exception as error:
                value = {"raised": exception_line(error)}
            yield steady(name, place), steady(value, place)
    except Exception as error:
        yield "the section", {"raised": steady(exception_line(error), place)}


def write(file: Path, found: Iterable[tuple[str, Any]]) -> int:
    """Write a section's entries, sorted, one a line. Returns their number."""
    values: dict[str, Any] = {}
    for name, value in found:
        assert name not in values, f"two entries are named {name}"
        values[name] = value
    lines = [f"{json.dumps(name)}: {json.dumps(values[name], sort_keys=True)}" for name in sorted(values)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return len(values)


def record(out: Path, sections: Iterable[str], published: str | None) -> int:
    """Record sections one after the other, each in a process of its own. Returns 1 if one cannot be recorded."""
    failed = 0
    out.mkdir(parents=True, exist_ok=True)
    for section in sections:
        with tempfile.TemporaryDirectory(prefix="golden-") as home:
            began = time.monotonic()
            # Neither the user's data folder nor kept traces and answers take part.
            environment = {"PATH": os.environ["PATH"], "HOME": home, "XDG_CACHE_HOME": home, **_SETTINGS}
            command = [sys.executable, "-m", "tests.golden.record", f"section={section}", f"out={out}"]
            command += [f"published={published}"] if published else []
            done = subprocess.run(command, env={**environment, "PYTHONPATH": str(ROOT)}, cwd=ROOT)
            failed |= done.returncode != 0
            print(f"{section}: {time.monotonic() - began:.0f} s", flush=True)
    return int(failed)


def main(arguments: list[str]) -> int:
    """Record what the arguments name. Returns the exit code."""
    given = dict(argument.partition("=")[::2] for argument in arguments)
    if unknown := given.keys() - {"out", "sections", "section", "published"} or "out" not in given:
        print(f"error: out=FOLDER, sections=[...] and published=FOLDER are what may be given; got {unknown}")
        return 2
    out, published = Path(given["out"]).resolve(), given.get("published")
    if section := given.get("section"):  # the process of one section
        import torch

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="golden-") as place:
            os.chdir(place)
            write(out / f"{section}.json", entries(section, Path(place), published=published))
        return 0
    chosen = given["sections"].strip("[]").split(",") if "sections" in given else list(SECTIONS)
    if unknown := [name for name in chosen if name not in SECTIONS]:
        print(f"error: unknown sections {', '.join(unknown)}; known: {', '.join(SECTIONS)}")
        return 2
    return record(out, chosen, os.path.abspath(published) if published else None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
