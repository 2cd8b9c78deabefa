"""Generates docs/commands.md from every command's `--help`; with `--check`, says whether the file is still true.

Start reading at `commands_markdown`.
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections import Counter
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "commands.md"
SHARED_FROM = 2  # commands that must have a key before it is described once for all of them
sys.path.insert(0, str(ROOT))  # a script's own folder is first, and another checkout may be installed

from conf.cli import help_text  # noqa: E402
from conf.commands import COMMANDS  # noqa: E402


def command_modules() -> dict[str, str]:
    """Return name of the command -> module that runs it."""
    return COMMANDS


def key_lines(help_lines: list[str]) -> dict[str, str]:
    """Return the lines of a help text that describe a key: with single spaces -> as they are aligned."""
    start = next((at for at, line in enumerate(help_lines) if line.startswith("Keys")), len(help_lines))
    return {" ".join(line.split()): line for line in help_lines[start + 1 :] if line.startswith("  ")}


def shared_keys(help_texts: Collection[str]) -> dict[str, str]:
    """Return the key lines, as `key_lines` does, that at least `SHARED_FROM` commands have word for word."""
    of_commands = [key_lines(text.splitlines()) for text in help_texts]
    counts = Counter(line for lines in of_commands for line in lines)
    aligned = {line: text for lines in reversed(of_commands) for line, text in lines.items()}
    return {line: aligned[line] for line, commands in counts.items() if commands >= SHARED_FROM}


def without_shared(text: str, shared: Collection[str]) -> str:
    """Return a command's help text with its shared keys as one line of names, and without lines that all texts have."""
    lines = [line for line in text.splitlines() if not line.endswith("are the same command.")]
    lines = ["Keys:" if line.startswith("Keys (") else line for line in lines]
    names = [line.partition("=")[0] for line in key_lines(lines) if line in shared]
    kept = [line for line in lines if not (line.startswith("  ") and " ".join(line.split()) in shared)]
    if names:
        groups = dict.fromkeys(f"{name.partition('.')[0]}.*" if "." in name else name for name in names)
        kept.append(f"  and the shared keys {', '.join(groups)}")
    return re.sub(r"\n{3,}", "\n\n", "\n".join(kept))


def commands_markdown() -> str:
    """Return the whole file."""
    modules = command_modules()
    help_texts = {name: help_text(name) for name in modules}
    shared = shared_keys(list(help_texts.values()))
    parts = [
        "# Commands",
        "",
        "Generated from each command's `--help all` by `make docs`; change the classes in `conf.commands.TABLE`.",
        "",
        "`gpufarm` lists these commands, and `gpufarm submit` is `python -m farm.submit`. Use `gpufarm` from a folder",
        "whose own files are named like packages of this project (`conf/`, `workers.py`).",
        "",
        "Every key can be set on the command line as `KEY=VALUE`, in Hydra's syntax. `--cfg job` prints what a command",
        "would run with. The brackets before a key's meaning say what it may hold. Text and paths are taken as typed;",
        "quote a value (`data=\"'[a]'\"`) that would be a list, a mapping or `null`. Of a key that is given twice the",
        "last value counts. Exit codes: 0 done, 1 something failed (`warehouse.compact`: files that cannot be read;",
        "`warehouse.snapshot verify=`, `warehouse.check`: damaged ones; `farm.doctor repair=true`: something is left),",
        "2 a mistake that you can fix, 75 what the command worked with has died and the same command goes on (Ray's",
        "head; another growth cycle), 130 interrupted.",
        "",
        *(f"- [`python -m {module}`](#{_anchor(module)})" for module in modules.values()),
        "",
        "## Shared keys",
        "",
        "Several commands have these keys, with the same meaning. Their `--help all` prints them all.",
        "",
        "```text",
        *shared.values(),
        "```",
    ]
    for name, module in modules.items():
        parts += ["", f"## {module}", "", "```text", without_shared(help_texts[name], shared), "```"]
    return "\n".join(parts) + "\n"


def _anchor(heading: str) -> str:
    """Return the link target that Markdown renderers make of a heading."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def main() -> int:
    parser = argparse.ArgumentParser(description="Generate docs/commands.md from every command's --help.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is stale")
    wanted = commands_markdown()
    name = TARGET.relative_to(ROOT).as_posix()
    if not parser.parse_args().check:
        TARGET.write_text(wanted, encoding="utf-8")
        print(f"{name}: {len(command_modules())} commands")
        return 0
    there = TARGET.read_text(encoding="utf-8") if TARGET.exists() else ""
    if there == wanted:
        return 0
    print(f"{name} is stale: run `make docs` and commit it", file=sys.stderr)
    diff = difflib.unified_diff(there.splitlines(), wanted.splitlines(), name, "what --help says", lineterm="")
    print("\n".join(diff), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
