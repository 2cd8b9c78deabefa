"""Writes the real output of commands into README.md; with `--check`, says whether what stands there is still true.

Start reading at `Block`: a comment names the command, what stands between it and its end is made by running it.

    <!-- run: python -m farm.submit +arch=cnn n=64 -->
    (the output)
    <!-- /run -->

`the sql above` and `the python above` run the fenced code before the comment. Further lines of the comment,
`hide: REGEX`, leave lines of the output out. `NEWEST_RUN` in a command is the id of the last run that ended ok.

All commands of the page run in its order in one temporary folder, so that later ones find what earlier ones left there.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "README.md"
DATA = "demo-data"
LEFT_OUT = "[...]"
WIDTH = 120
INDENT = "    "
# What differs from run to run and from machine to machine, and what the page has instead.
VOLATILE = (
    (r"because there is no usable GPU here.*", "because there is no usable GPU here"),
    (r"\d{8}T\d{6}Z-[0-9a-f]{8}", "YYYYMMDDThhmmssZ-xxxxxxxx"),  # as wide, so that tables stay straight
    (r"^estimated in .*\n", ""),
    (r"[ \t]+$", ""),
)
_BLOCK = re.compile(
    r"^<!-- run: (?P<command>[^\n]*?)(?P<options>(?:\n[^\n]*?)*?) ?-->\n(?P<body>.*?)^<!-- /run -->$", re.M | re.S
)
_FENCED = re.compile(r"^```(?P<language>sql|python)\n(?P<code>.*?)^```$", re.M | re.S)
_NEWEST = "SELECT run_id FROM runs WHERE status = 'ok' ORDER BY task_index DESC LIMIT 1"
_ABOVE = {"the sql above": ("sql", ("-m", "warehouse.query")), "the python above": ("python", ("-c",))}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One marked block of the page.

    command   as it is shown and run by bash; `the sql above` and `the python above` run the fenced code before it
    code      that code, or None
    hide      lines of the output that match are left out; `[...]` stands for each group of them
    body      what stands in the page now
    """

    command: str
    code: str | None
    hide: tuple[str, ...]
    body: str

    @property
    def arguments(self) -> list[str]:
        """The command line that is executed."""
        if self.code is None:
            return ["bash", "-c", self.command]
        return [sys.executable, *_ABOVE[self.command][1], self.code]


def blocks_of(page: str) -> list[Block]:
    """Return the marked blocks in their order. Raises `SystemExit` for one that is not well-formed."""
    starts, blocks = len(re.findall(r"^<!-- run: ", page, re.M)), []
    for match in _BLOCK.finditer(page):
        command, code = match["command"].strip(), None
        if command in _ABOVE:
            before = [m for m in _FENCED.finditer(page, 0, match.start()) if m["language"] == _ABOVE[command][0]]
            if not before:
                raise SystemExit(f"error: there is no fenced code for <!-- run: {command} -->")
            code = before[-1]["code"]
        hide = []
        for line in match["options"].strip().splitlines():
            name, _, value = line.strip().partition(": ")
            if name != "hide":
                raise SystemExit(f"error: <!-- run: {command} --> has an unknown option: {line.strip()}")
            hide.append(value)
        blocks.append(Block(command=command, code=code, hide=tuple(hide), body=match["body"]))
    if len(blocks) != starts:
        raise SystemExit(f"error: {starts} blocks begin with <!-- run: and {len(blocks)} end with <!-- /run -->")
    return blocks


def output_of(block: Block, folder: Path) -> str:
    """Run the block's command in the folder and return what it says. Raises `SystemExit` where it fails."""
    completed = _execute(block.arguments, folder, subprocess.STDOUT)
    if completed.returncode != 0:
        raise SystemExit(f"error: {block.command} ended with exit code {completed.returncode}:\n{completed.stdout}")
    return completed.stdout.replace(f"{folder}/", "").replace(str(folder), ".")


def _execute(arguments: Sequence[str], folder: Path, stderr: int) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "GPUFARM_DATA": DATA,
        "COLUMNS": str(WIDTH),
    }
    return subprocess.run(arguments, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True)


def _with_newest_run(block: Block, folder: Path) -> Block:
    if "NEWEST_RUN" not in block.command:
        return block
    query = [sys.executable, "-m", "warehouse.query", _NEWEST, "format=csv"]
    lines = _execute(query, folder, subprocess.PIPE).stdout.split()
    if len(lines) != 2:
        raise SystemExit(f"error: {block.command}: no run has ended ok")
    return replace(block, command=block.command.replace("NEWEST_RUN", lines[1]))


def body_of(block: Block, output: str) -> str:
    """Return the block's new text: the command, and its output without what changes from run to run."""
    for pattern, text in VOLATILE:
        output = re.sub(pattern, text, output, flags=re.M)
    lines = [] if block.code else [f"$ {block.command}"]
    for line in output.rstrip("\n").split("\n"):
        if not any(re.search(pattern, line) for pattern in block.hide):
            lines.append(line)
        elif lines[-1:] != [LEFT_OUT]:
            lines.append(LEFT_OUT)
    indented = "".join(f"{INDENT}{line}".rstrip() + "\n" for line in lines)
    return f"\n{indented}\n"


def regenerated(page: str, progress: Callable[[str], None] = lambda command: None) -> str:
    """Return the page with every block's output renewed."""
    with tempfile.TemporaryDirectory(prefix="gpufarm-readme-") as folder:
        blocks = iter(blocks_of(page))

        def rewritten(match: re.Match[str]) -> str:
            block = _with_newest_run(next(blocks), Path(folder))
            progress(block.command)
            head, tail = page[match.start() : match.start("body")], page[match.end("body") : match.end()]
            return head + body_of(block, output_of(block, Path(folder))) + tail

        return _BLOCK.sub(rewritten, page)


def shown_commands(page: str) -> Iterator[tuple[Block, str]]:
    """Yield each block of a command line, and the command that its text shows."""
    for block in blocks_of(page):
        if block.code is None:
            first = next((line for line in block.body.splitlines() if line.strip()), "")
            yield block, first.strip().removeprefix("$ ")


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the real output of commands into README.md.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the output has changed")
    check = parser.parse_args().check
    page = TARGET.read_text(encoding="utf-8")
    wanted = regenerated(page, progress=lambda command: print(f"$ {command}", file=sys.stderr))
    if not check:
        TARGET.write_text(wanted, encoding="utf-8")
        print(f"{TARGET.name}: {len(blocks_of(page))} blocks of output")
        return 0
    if page == wanted:
        return 0
    print(f"{TARGET.name} is stale: run `make readme` and commit it", file=sys.stderr)
    diff = difflib.unified_diff(page.splitlines(), wanted.splitlines(), TARGET.name, "what they print", lineterm="")
    print("\n".join(diff), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
