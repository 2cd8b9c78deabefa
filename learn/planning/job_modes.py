"""Which modes a plan tries for a model, and which shared settings its training goes with.

Start reading at `modes_of_job`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from conf.errors import UsageError
from featurize.training_settings import Training
from learn.planning.meshes import Modes, checked_modes, layout_of, modes_of

if TYPE_CHECKING:
    from torch import nn

_EXPERTS = "ep"


def modes_of_job(given: object, inputs: object, model: Callable[[], nn.Module | None]) -> Modes:
    """Return the modes of a plan.

    Args:
        given: As `learn.planning.meshes.modes_of` takes it.
        inputs: Of the model, on any device.
        model: Makes it on the meta device, or None where it cannot; called where its experts matter.

    Raises:
        UsageError: As `modes_of`.
    """
    experts: set[int] = set()
    if given is None or _EXPERTS in checked_modes(given):
        from featurize.parallel.experts import expert_counts  # its imports take a while

        made = model()
        experts = set() if made is None else expert_counts(made)
    return modes_of(given, _tokens_of(inputs), experts)


def _tokens_of(inputs: object) -> int:
    """The length of sequences: of [N, length] whole numbers, or [N, length, width] floats; 0 where there are none."""
    from featurize.batches import tensors_of

    for one in tensors_of(inputs):
        if one.dim() == (3 if one.is_floating_point() else 2):
            return one.shape[1]
    return 0


def apt_for_training(
    settings: Mapping[str, Any], gpus: int, training: Training
) -> tuple[Mapping[str, Any], tuple[str, ...]]:
    """Return the settings that layouts share, without `zero` where DeepSpeed does not go with the training, and a note
    on that. Layouts of `ddp` alone are then those of DistributedDataParallel.

    Args:
        settings: As `learn.planning.meshes.layout_settings` returns them.
        gpus: Of the job.
        training: Its settings.
    """
    if not settings.get("zero"):
        return settings, ()
    from featurize.parallel.zero_settings import settings_of_ranks

    try:
        settings_of_ranks(layout_of({"ddp": gpus}, settings), training)
    except UsageError as error:
        without = {name: value for name, value in settings.items() if name != "zero"}
        return without, (f"layouts of ddp alone are tried without zero: {error}",)
    return settings, ()
