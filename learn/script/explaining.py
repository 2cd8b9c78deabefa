"""Says where a script failed: the innermost line of the user's own code, the operator and the module.

Start reading at `explained`.
"""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from conf.errors import CommandError
from conf.own_packages import ROOT
from conf.plain_text import first_line
from featurize.module_stack import origin
from learn.script.containment import DISTRIBUTED

_OWN = (ROOT.resolve() / "learn", ROOT.resolve() / "featurize", Path(sysconfig.get_path("stdlib")).resolve())
_LAUNCHED = (
    "; the script expects a launcher: estimate the command that starts it, such as torchrun --nproc-per-node 8 train.py"
)


def explained(error: BaseException, script: str) -> str:
    """Return one line for what a script raised.

    Args:
        error: What was raised, with its traceback.
        script: The script's path, or its module's name.
    """
    folders = (Path(script).resolve().parent, Path.cwd())
    frames, near = _frames(error, folders)
    while error.__cause__ is not None:  # a framework's own error, raised from the user's
        its_frames, its_near = _frames(error.__cause__, folders)
        if not its_near:
            break
        error, frames, near = error.__cause__, its_frames, its_near
    where = next((f"{frame.filename}:{frame.lineno}: " for frame in reversed(near or frames)), "")
    if isinstance(error, CommandError):  # this project refuses what the line asks for
        return f"{where}{error}"
    operator, module = origin(error)
    of = f" in operator {operator}" if operator else ""
    of += f" of module {module!r}" if module else ""
    text = first_line(error) if isinstance(error, Exception) else str(error)
    launched = isinstance(error, KeyError) and error.args and error.args[0] in DISTRIBUTED
    return f"{where}{type(error).__name__}{of}: {text}{_LAUNCHED if launched else ''}"


def _frames(
    error: BaseException, folders: tuple[Path, ...]
) -> tuple[list[traceback.FrameSummary], list[traceback.FrameSummary]]:
    """Return the frames of code that the user could have written, and those of them below the folders."""
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [one for one in all_frames if not one.filename.startswith("<") and not is_installed(one.filename)]
    return frames, [f for f in frames if any(Path(f.filename).resolve().is_relative_to(folder) for folder in folders)]


def is_installed(filename: str) -> bool:
    """Return whether a file is the standard library's, an installed library's, or this project's own code."""
    path = Path(filename).resolve()
    is_own = any(path.is_relative_to(folder) for folder in _OWN)
    return is_own or any(part in ("site-packages", "dist-packages", "torch") for part in path.parts)
