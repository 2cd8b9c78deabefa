"""Installs the torchvision that matches this environment's torch; keeps one from another build aside.

Start reading at `main`. Arguments go to pip, as for torch: `--index-url ADDRESS`.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conf.files.identity import aside_folder

PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


def main(options: Sequence[str]) -> int:
    """Install torchvision; return 0, also if it is kept aside, or pip's exit code."""
    torch = importlib.metadata.version("torch")
    # Naming torch makes pip choose the torchvision of that release and leave torch unchanged.
    wanted = [f"torch=={torch.partition('+')[0]}", "torchvision"]
    installed = subprocess.run([*PIP, "install", "--quiet", "--upgrade-strategy", "only-if-needed", *options, *wanted])
    if installed.returncode:
        return installed.returncode
    shutil.rmtree(aside_folder(), ignore_errors=True)
    if _is_importable():
        return 0
    release = importlib.metadata.version("torchvision").partition("+")[0]
    subprocess.run([*PIP, "uninstall", "--quiet", "--yes", "torchvision"], check=True)
    target = ["--no-deps", "--target", str(aside_folder()), *options, f"torchvision=={release}"]
    subprocess.run([*PIP, "install", "--quiet", *target], check=True)
    print(
        f"torchvision {release} comes from another build than torch {torch}, so `import torchvision` would fail: it is "
        "kept aside, where only gpufarm finds it for its models.\nTo import it yourself: pip install torchvision, with "
        "the --index-url that torch came from."
    )
    return 0


def _is_importable() -> bool:
    code = "import torchvision, torch; torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
