"""How far distilled and guessed workspaces are from cuDNN's own, on networks that nothing was fitted on.

Start reading at `judged`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from conf.units import MIB
from featurize.cudnn.distilled import DistilledWorkspaces
from featurize.cudnn.signature import ConvolutionSignature, SearchSettings
from featurize.cudnn.workspace_formulas import ELEMENT_BYTES, workspace_class
from featurize.device_spec import DeviceSpec
from featurize.library_calls import LibraryCall, workspace_bytes
from learn.workspaces.labels import LabelledWorkspaces

_KINDS = {
    "forward": "conv_forward", "data_gradient": "conv_backward_data", "weight_gradient": "conv_backward_weight",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class WorkspaceScore:
    """How well one way of answering does on one GPU model.

    class_share     of the convolutions, whose class of workspace is named: 0, below 1 MiB, then powers of two
    near_share      whose class is named or a neighbouring one is
    median_mib      median of the absolute error
    p90_mib         90th percentile of it
    relative_error  sum of the absolute errors over the sum of the workspaces
    """

    device: str
    source: str
    convolutions: int
    class_share: float
    near_share: float
    median_mib: float
    p90_mib: float
    relative_error: float


def judged(device: DeviceSpec, rows: LabelledWorkspaces, models: DistilledWorkspaces) -> list[WorkspaceScore]:
    """Return the scores of distilled and of guessed workspaces, on the convolutions for which cuDNN has an engine."""
    known = rows.where(~np.isnan(rows.nbytes))
    distilled = np.zeros(len(known.signatures))
    for allow_tf32 in (True, False):
        places = np.flatnonzero(known.allow_tf32 == allow_tf32)
        answers = models.workspaces(
            (known.signatures[place] for place in places), SearchSettings(allow_tf32=allow_tf32)
        )
        distilled[places] = [answers[known.signatures[place]] or 0 for place in places]
    guessed = np.array([workspace_bytes(_call(signature), device) for signature in known.signatures], dtype=np.float64)
    return [_score(device, "distilled", known.nbytes, distilled), _score(device, "guessed", known.nbytes, guessed)]


def _call(signature: ConvolutionSignature) -> LibraryCall:
    return LibraryCall(
        _KINDS[signature.operation],
        (signature.image, signature.kernel, signature.response),
        ELEMENT_BYTES[signature.dtype],
        signature.channels_last,
        signature.groups,
        convolution=signature,
    )


def _score(device: DeviceSpec, source: str, nbytes: np.ndarray, answers: np.ndarray) -> WorkspaceScore:
    apart = np.abs(workspace_class(answers) - workspace_class(nbytes))
    errors = np.abs(answers - nbytes)
    return WorkspaceScore(
        device=device.name,
        source=source,
        convolutions=len(nbytes),
        class_share=float((apart == 0).mean()),
        near_share=float((apart <= 1).mean()),
        median_mib=float(np.median(errors) / MIB),
        p90_mib=float(np.quantile(errors, 0.9) / MIB),
        relative_error=float(errors.sum() / max(nbytes.sum(), 1)),
    )


def table_of(scores: Sequence[WorkspaceScore]) -> str:
    """Return the scores as lines of text."""
    head = ("device", "source", "convolutions", "class", "or next", "median MiB", "p90 MiB", "of all bytes")
    lines = [
        (
            score.device, score.source, f"{score.convolutions:,}", f"{score.class_share:.1%}",
            f"{score.near_share:.1%}", f"{score.median_mib:.2f}", f"{score.p90_mib:.1f}", f"{score.relative_error:.1%}",
        )
        for score in scores
    ]  # fmt: skip
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) if place < 2 else cell.rjust(width)
                  for place, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in (head, *lines)
    )  # fmt: skip
