"""Finds the wheels that hold cuDNN, without loading any of it.

Start reading at `installed_libraries`.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

from conf.errors import EnvironmentProblem
from conf.extras import missing_from_extra

OLDEST = (9, 8, 0)  # earlier releases know no device that is not there
_VERSION = re.compile(r"#define CUDNN_(MAJOR|MINOR|PATCHLEVEL)\s+(\d+)")


@dataclass(frozen=True)
class CudnnLibraries:
    """cuDNN's version, as `9.28.0`, and the libraries to load before its frontend, in their order."""

    version: str
    paths: tuple[str, ...]


def installed_libraries() -> CudnnLibraries:
    """Return the libraries of the installed wheels.

    Raises:
        EnvironmentProblem: A package is missing (the message names the extra), or cuDNN is older than `OLDEST`.
    """
    if (advice := missing_from_extra("cudnn")) is not None:
        raise EnvironmentProblem(advice)
    spec = importlib.util.find_spec("nvidia")
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec is not None else []
    # CUDA 12 has a folder for each library, CUDA 13 one for all but cuDNN.
    patterns = {
        "nvidia-cuda-runtime": ("cuda_runtime/lib/libcudart.so.*", "cu1*/lib/libcudart.so.*"),
        "nvidia-cuda-nvrtc": ("cuda_nvrtc/lib/libnvrtc.so.*", "cu1*/lib/libnvrtc.so.*"),
        # cuDNN ends its process where it does not find this one, which may lie in another folder.
        "nvidia-cublas": ("cublas/lib/libcublasLt.so.*", "cu1*/lib/libcublasLt.so.*"),
        "nvidia-cudnn": ("cudnn/lib/libcudnn.so.9",),
    }
    paths = {name: _first(folders, choices) for name, choices in patterns.items()}
    if missing := [name for name, path in paths.items() if path is None]:
        raise EnvironmentProblem(f"{', '.join(missing)} is not installed: pip install 'gpufarm[cudnn]'")
    chosen = [path for path in paths.values() if path is not None]
    version = _version_of(chosen[-1].parent.parent / "include" / "cudnn_version.h")
    if version < OLDEST:
        raise EnvironmentProblem(
            f"cuDNN {_text(version)} is installed; {_text(OLDEST)} and later answer without a GPU: "
            "pip install 'gpufarm[cudnn]'"
        )
    return CudnnLibraries(_text(version), tuple(map(str, chosen)))


def _first(folders: list[Path], patterns: tuple[str, ...]) -> Path | None:
    for folder in folders:
        for pattern in patterns:
            for path in sorted(folder.glob(pattern)):
                if path.suffix[1:].isdigit():  # not libnvrtc.so.12.alt
                    return path
    return None


def _version_of(header: Path) -> tuple[int, ...]:
    try:
        parts = dict(_VERSION.findall(header.read_text(encoding="utf-8")))
        return tuple(int(parts[name]) for name in ("MAJOR", "MINOR", "PATCHLEVEL"))
    except (OSError, KeyError) as error:
        raise EnvironmentProblem(f"{header} does not say cuDNN's version: {error}") from error


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
