"""Installs the torchvision that matches this environment's torch; one of another build is kept aside.

Start reading at `main`. Arguments are pip's, as for torch: `--index-url ADDRESS`.
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
    """Install torchvision; 0 also where it is kept aside, else pip's exit code."""
    torch = importlib.metadata.version("torch")
    # With torch named, pip takes the torchvision of that release and leaves torch as it is.
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
        f"torchvision {release} is of another build than torch {torch}, so `import torchvision` would fail: it is kept "
        "aside, where gpufarm alone finds it for its models.\nFor one of your own: pip install torchvision, with the "
        "--index-url that torch came from."
    )
    return 0


def _is_importable() -> bool:
    code = "import torchvision, torch; torch.ops.torchvision.nms(torch.zeros(1, 4), torch.zeros(1), 0.5)"
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
