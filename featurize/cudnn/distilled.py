"""Workspaces of convolutions where cuDNN is not installed: from trees that were fitted on its answers.

Start reading at `DistilledWorkspaces.workspaces`. A first set of trees names the formula of a workspace
(`featurize.cudnn.workspace_formulas`), a second one the bytes of those that no formula gives.
`python -m learn.distil_cudnn` builds the file. Numpy only.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conf.errors import EnvironmentProblem, UsageError
from featurize.cudnn.device_properties import cudnn_capability
from featurize.cudnn.packed_trees import PackedTrees
from featurize.cudnn.signature import OPERATIONS, ConvolutionSignature, SearchSettings
from featurize.cudnn.workspace_formulas import FEATURES, WorkspaceFormula, described
from featurize.device_spec import DeviceSpec

FILE = Path(__file__).with_name("distilled_workspaces.npz")
FORMAT = 1
# The kinds of a workspace; those from `FIRST_FORMULA` on are formulas.
NOTHING, NO_ENGINE, SMALL, OTHER, FIRST_FORMULA = 0, 1, 2, 3, 4


@dataclass(frozen=True)
class OperationModel:
    """One operation on one compute capability.

    kinds      trees that name the kind of a workspace: one output each
    formulas   of the kinds from `FIRST_FORMULA` on
    small      bytes of the kind `SMALL`
    logarithm  trees for the base-2 logarithm of the bytes of the kind `OTHER`
    partials   trees for the base-2 logarithm of the number of partial sums, of formulas that have some
    """

    kinds: PackedTrees
    formulas: tuple[WorkspaceFormula, ...]
    small: int
    logarithm: PackedTrees
    partials: PackedTrees

    def workspaces(
        self, signatures: list[ConvolutionSignature], *, allow_tf32: bool, sm_count: int
    ) -> list[int | None]:
        """Return the bytes of each workspace; None where cuDNN has no engine."""
        convolutions = described(signatures, allow_tf32=allow_tf32, sm_count=sm_count)
        kinds = self.kinds.scores(convolutions.features).argmax(axis=1)
        nbytes = np.zeros(len(signatures))
        nbytes[kinds == SMALL] = self.small
        if (others := kinds == OTHER).any():
            nbytes[others] = 2.0 ** self.logarithm.scores(convolutions.features[others])[:, 0]
        for place, formula in enumerate(self.formulas):
            if (of_formula := kinds == FIRST_FORMULA + place).any():
                nbytes[of_formula] = convolutions.bytes_of(formula)[of_formula]
                if formula.partials:
                    number = np.round(2.0 ** self.partials.scores(convolutions.features[of_formula])[:, 0])
                    nbytes[of_formula] += number * convolutions.partial_bytes[formula.padding][of_formula]
        return [None if kind == NO_ENGINE else int(size) for kind, size in zip(kinds, nbytes, strict=True)]


@dataclass(frozen=True)
class DistilledWorkspaces:
    """The models of one GPU model's compute capability.

    cudnn       version whose answers they were fitted on
    capability  of those answers; the device's own, or the nearest older one of the same generation
    """

    cudnn: str
    capability: tuple[int, int]
    sm_count: int
    operations: Mapping[str, OperationModel]

    def workspaces(
        self, signatures: Iterable[ConvolutionSignature], search: SearchSettings
    ) -> dict[ConvolutionSignature, int | None]:
        """Return the workspace in bytes of PyTorch's first choice; None where cuDNN has no engine.

        Known limitations: answers are of cuDNN's mode A, without `cudnn.benchmark` and determinism.
        """
        wanted = list(dict.fromkeys(signatures))
        answers: dict[ConvolutionSignature, int | None] = {}
        for operation, model in self.operations.items():
            alike = [signature for signature in wanted if signature.operation == operation]
            if alike:
                sizes = model.workspaces(alike, allow_tf32=search.allow_tf32, sm_count=self.sm_count)
                answers |= dict(zip(alike, sizes, strict=True))
        return answers


@functools.lru_cache(maxsize=16)
def distilled_for(device: DeviceSpec, path: Path = FILE) -> DistilledWorkspaces:
    """Return the models for a GPU model.

    Raises:
        UsageError: No answers for its generation were distilled; the message lists those that were. An AMD GPU.
        EnvironmentProblem: The file is missing or damaged.
    """
    try:
        with np.load(path, allow_pickle=False) as arrays:
            about = json.loads(str(arrays["about"]))
            capability = _nearest(device, about)
            name = f"{capability[0]}.{capability[1]}"
            operations = {
                operation: _operation_model(arrays, about["models"][name][operation], f"{name}/{operation}/")
                for operation in OPERATIONS
            }
        return DistilledWorkspaces(about["cudnn"], capability, device.sm_count, operations)
    except UsageError:
        raise
    except (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise EnvironmentProblem(
            f"{path} holds no distilled workspaces ({type(error).__name__}: {error}); "
            "reinstall gpufarm, or build it: python -m learn.distil_cudnn"
        ) from error


def _nearest(device: DeviceSpec, about: Mapping[str, Any]) -> tuple[int, int]:
    """Return the newest capability that was distilled and is not newer than the device's, of the same generation."""
    if about["format"] != FORMAT or tuple(about["features"]) != FEATURES:
        raise ValueError("it is of another version")
    known = sorted(tuple(map(int, name.split("."))) for name in about["models"])
    major, minor = cudnn_capability(device)
    older = [
        (known_major, known_minor)
        for known_major, known_minor in known
        if known_major == major and known_minor <= minor
    ]
    if not older:
        names = ", ".join(f"{known_major}.{known_minor}" for known_major, known_minor in known)
        raise UsageError(f"workspaces=distilled knows compute capabilities {names}; {device.name} has {major}.{minor}")
    return older[-1]


def _operation_model(arrays: Mapping[str, np.ndarray], about: Mapping[str, Any], prefix: str) -> OperationModel:
    return OperationModel(
        kinds=PackedTrees.from_arrays(arrays, f"{prefix}kinds/"),
        formulas=tuple(WorkspaceFormula(*formula) for formula in about["formulas"]),
        small=int(about["small"]),
        logarithm=PackedTrees.from_arrays(arrays, f"{prefix}logarithm/"),
        partials=PackedTrees.from_arrays(arrays, f"{prefix}partials/"),
    )
