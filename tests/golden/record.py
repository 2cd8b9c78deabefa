"""Records what this checkout answers, so that a later one can be compared with it, entry by entry.

    python -m tests.golden.record out=FOLDER [sections=[estimates,help]] [published=FOLDER]
    python -m tests.golden.compare a=FOLDER b=FOLDER

Start reading at `SECTIONS`. A section is a function that yields names and values; a value that is a function is called,
and what it raises is recorded. Each section runs in a process and in an empty folder of its own, and becomes one JSON
file with an entry a line. `recorded/` beside this file holds the committed record.
"""

import contextlib
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
from collections.abc import Mapping
from pathlib import Path

from conf.errors import exception_line
from conf.files.identity import version_of

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
LIBRARIES = ("torch", "torchvision", "timm", "transformers", "numpy", "lightgbm", "scikit-learn", "duckdb", "pyarrow")
DIGITS = 10
_SETTINGS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "COLUMNS": "120", "TZ": "UTC", "PYTHONHASHSEED": "0"}
_TIMES = re.compile(r"(^|_)(seconds|wall_s|overhead_s|gpu_hours|at)$")  # keys whose values are of the clock
_DATE = "|".join(str(datetime.date.today() + datetime.timedelta(days=days)) for days in (-1, 0, 1))
# What differs between two runs of the same code, and what stands for it in a record.
_PATTERNS = {
    re.escape(str(ROOT)): "ROOT",
    re.escape(sys.prefix): "VENV",
    rf"({_DATE})[T ]\d\d:\d\d(:\d\d)?(\.\d+)?(\+00:00|Z| UTC)?": "TIME",
    rf"({_DATE})(\.\d+)?": "TODAY",
    r"\b\d\d:\d\d:\d\d\b": "TIME",
    r"[^\n]*\d/\d+( steps,|  )[^\n]*\n": "",  # of a bar, which moves by the clock
    r"\b(canary|grow)-[0-9a-f]{8}": r"\1-TOKEN",
    r"\bmerged-\d{8}T\d{6}-[0-9a-f]{12}": "merged-TOKEN",
    r"-[0-9a-f]{6}\.html": "-HASH.html",  # of the paths of what was compared
}


def versions():
    """Yield the releases that the other sections depend on."""
    for name in LIBRARIES:
        yield name, version_of(name)


def steady(value, place):
    """Return a value as JSON that is the same whenever and wherever the same code gives it.

    Args:
        value: What JSON holds, NumPy's numbers, tuples and NaN. A text of several lines becomes a list.
        place: The folder that the section runs in.
    """
    if isinstance(value, Mapping):
        clock = {key for key, item in value.items() if item is not None and _TIMES.search(str(key))}
        return {str(key): "TIME" if key in clock else steady(item, place) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [steady(item, place) for item in value]
    if hasattr(value, "tolist"):
        return steady(value.tolist(), place)
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int):
        return value
    text = str(value).replace(str(place), "PLACE")
    for pattern, name in _PATTERNS.items():
        text = re.sub(pattern, name, text)
    return text.split("\n") if "\n" in text else text


def entries(section, place, *given):
    """Yield each entry of a section: its name, and its value as JSON."""
    module, _, function = SECTIONS[section].partition(":")
    try:
        for name, value in getattr(importlib.import_module(module), function)(*given):
            try:
                value = value() if callable(value) else value
            except Exception as error:
                value = {"raised": exception_line(error)}
            yield steady(name, place), steady(value, place)
    except Exception as error:
        yield "the section", {"raised": steady(exception_line(error), place)}


def write(file, found):
    """Write a section's entries, sorted, one a line."""
    found = list(found)
    values = dict(found)
    assert len(values) == len(found), "two entries have one name"
    lines = [f"{json.dumps(name)}: {json.dumps(values[name], sort_keys=True)}" for name in sorted(values)]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def in_a_process(section, out, published):
    """Record one section in a process of its own, which the user's data folder and caches are hidden from."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="golden-") as home:
        environment = {"PATH": os.environ["PATH"], "HOME": home, "XDG_CACHE_HOME": home, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.golden.record", f"section={section}", f"out={out}"]
        subprocess.run([*command, f"published={published}"], env=environment | _SETTINGS, cwd=ROOT, check=True)
    print(f"{section}: {time.monotonic() - began:.0f} s", flush=True)


def arguments_of(words, known):
    """Return the arguments by key; those of an unknown key end the process in one line."""
    given = dict(word.partition("=")[::2] for word in words)
    sections = [name for name in given.pop("sections", "").strip("[]").split(",") if name]
    for unknown, of in ((given.keys() - set(known), known), (set(sections) - set(SECTIONS), SECTIONS)):
        if unknown:
            print(f"error: unknown {', '.join(sorted(unknown))}; known: {', '.join(of)}", file=sys.stderr)
            sys.exit(2)
    return given | {"sections": sections}


def main(words):
    """Record the sections that are named, or all."""
    given = arguments_of(words, ("out", "section", "published"))
    out, published = Path(given.get("out", "build/golden")).resolve(), given.get("published", "")
    if section := given.get("section"):  # the process of one section
        import torch

        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory(prefix="golden-") as place, contextlib.chdir(place):
            write(out / f"{section}.json", entries(section, Path(place), *[published] * (section == "published")))
        return
    out.mkdir(parents=True, exist_ok=True)
    for section in given["sections"] or SECTIONS:
        in_a_process(section, out, published and os.path.abspath(published))


if __name__ == "__main__":
    main(sys.argv[1:])
