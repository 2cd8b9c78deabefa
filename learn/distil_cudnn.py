"""`python -m learn.distil_cudnn`: fit the workspaces for machines without cuDNN, on cuDNN's own answers.

Start reading at `distil`. It writes the file that `featurize.cudnn.distilled` reads.
"""

from __future__ import annotations

import itertools
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conf.cli import command
from conf.errors import UsageError
from conf.settings import data_key, key
from featurize.cudnn.device_properties import cudnn_capability

if TYPE_CHECKING:
    from featurize.cudnn.distilled import OperationModel
    from featurize.device_spec import DeviceSpec
    from learn.workspaces.judging import WorkspaceScore
    from learn.workspaces.labels import Progress

# Held out: nothing is fitted on them.
NETWORKS = (
    "resnet50", "regnety_032", "convnext_tiny", "efficientnet_b0", "densenet121", "resnext50_32x4d", "hrnet_w18",
    "inception_v3", "xception41", "vgg16", "res2net50_26w_4s", "darknet53",
)  # fmt: skip

FIRST_WITH_BFLOAT16 = (8, 0)  # compute capability that has tensor cores for it
# cuDNN 9.28's first choice depends on the number of multiprocessors on Turing alone, and hardly on Blackwell.
SMALLER_SHARE = 4  # one of so many convolutions is asked about on a second GPU model of a compute capability


@dataclass(frozen=True, kw_only=True)
class DistilSettings:
    """What to fit on, and what to judge by. Raises `UsageError` that names every bad key together.

      python -m farm.submit +arch=cudnn n=2000 device=simulated data=cudnn
      python -m learn.distil_cudnn data=cudnn out=distilled_workspaces.npz

    The runs of the family cudnn give the convolutions. cuDNN (extra cudnn) is asked about each, neighbours and plain
    ones, and all gradients, on a GPU model of conf/device for each compute capability. The table says how often the
    class of a workspace is named (0, below 1 MiB, then by powers of two), on the convolutions of networks that nothing
    is fitted on. It takes some fifteen minutes on two cores.
    """

    data: str | None = data_key()
    out: str | None = key(
        None, "file to write; default featurize/cudnn/distilled_workspaces.npz of this checkout", "new path"
    )
    answers: str | None = key(None, "file that keeps cuDNN's answers for a repeat; default none", "new path")
    variants: int = key(5, "neighbours of each run's convolution that are asked about, too", "int 0 to 100")
    plain: int = key(
        6000,
        "further convolutions of the shapes that layers mostly have, and a sixth more depthwise ones",
        "int 0 to 1000000",
    )
    rounds: int = key(60, "trees of each kind of workspace", "int 1 to 1000")
    judged: int = key(4000, "convolutions of networks that are judged on, drawn at random", "int 1 to 1000000")
    seed: int = key(0, "of the neighbours and the fits", "int 0 to 2147483647")
    workers: int = key(2, "processes of cuDNN, or fits, at a time", "int 1 to 256")

    def __post_init__(self) -> None:
        problems = []
        for name, path in (("out", self.path), ("answers", None if self.answers is None else Path(self.answers))):
            if path is not None and path.is_dir():
                problems.append(f"{name}={path} is a folder; name a file")
            elif path is not None and not path.parent.is_dir():
                problems.append(f"{name}={path}: there is no folder {path.parent}")
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def path(self) -> Path:
        """The file that is written."""
        from featurize.cudnn.distilled import FILE

        return FILE if self.out is None else Path(self.out)


def distil(settings: DistilSettings, progress: Progress, networks: tuple[str, ...] = NETWORKS) -> list[WorkspaceScore]:
    """Ask, fit, write the file and judge it.

    Raises:
        UsageError: The data folder holds too few runs of the family.
        EnvironmentProblem: cuDNN is not installed.
    """
    from featurize.cudnn.distilled import distilled_for
    from featurize.cudnn.signature import OPERATIONS
    from learn.workspaces.fitting import fitted_operation, save
    from learn.workspaces.judging import judged
    from learn.workspaces.labels import (
        answered,
        convolutions_of_networks,
        convolutions_of_runs,
        depthwise_convolutions,
        every_operation,
        joined,
        neighbours,
        plain_convolutions,
        require_cudnn,
    )
    from warehouse.folder import DataFolder

    folder = DataFolder.resolve(settings.data).open()
    version = require_cudnn()
    devices, smaller = _devices()
    kept = None if settings.answers is None else Path(settings.answers)
    convolutions = convolutions_of_runs(folder)
    progress("tracing networks", 0, 0)
    held_out = convolutions_of_networks(networks)
    held_out = random.Random(settings.seed).sample(held_out, min(settings.judged, len(held_out)))
    unseen = set(held_out)
    asked = [
        signature
        for signature in every_operation(
            itertools.chain(
                neighbours(convolutions, settings.variants, settings.seed),
                plain_convolutions(settings.plain, settings.seed),
                depthwise_convolutions(settings.plain // 6, settings.seed),
            )
        )
        if signature not in unseen
    ]
    labels = {
        **answered(asked, devices, settings.workers, progress, kept),
        **answered(asked[::SMALLER_SHARE], smaller, settings.workers, progress, kept),
    }
    capabilities = sorted(set(map(cudnn_capability, devices)))
    parts = [(capability, operation) for capability in capabilities for operation in OPERATIONS]
    rows = {
        capability: joined([labels[one.name] for one in (*devices, *smaller) if cudnn_capability(one) == capability])
        for capability in capabilities
    }
    fitted: dict[tuple[tuple[int, int], str], OperationModel] = {}

    def fit(part: tuple[tuple[int, int], str]) -> None:
        capability, operation = part
        of_operation = rows[capability].of_operation(operation)
        fitted[part] = fitted_operation(
            of_operation, rounds=settings.rounds, seed=settings.seed, halves_differ=capability < FIRST_WITH_BFLOAT16
        )
        progress("fitting", len(fitted), len(parts))

    with ThreadPoolExecutor(settings.workers) as pool:  # LightGBM holds no lock; its own threads wait for each other
        list(pool.map(fit, parts))
    models = {
        capability: {operation: fitted[capability, operation] for operation in OPERATIONS}
        for capability in capabilities
    }
    answers = answered(held_out, devices, settings.workers, progress, kept)
    save(models, settings.path, {"cudnn": version})
    distilled_for.cache_clear()
    return [
        score
        for device in devices
        for score in judged(device, answers[device.name], distilled_for(device, settings.path))
    ]


def _devices() -> tuple[list[DeviceSpec], list[DeviceSpec]]:
    """Return, of each compute capability that cuDNN knows, the described GPU model with the most multiprocessors; and
    the one with the fewest, where that is another number."""
    from featurize.cudnn.device_properties import device_properties
    from featurize.device_spec import device_names, load_device

    by_capability: dict[tuple[int, int], list[DeviceSpec]] = {}
    for device in map(load_device, device_names()):
        try:
            device_properties(device)
        except UsageError:
            continue  # not a GPU that cuDNN runs on
        by_capability.setdefault(cudnn_capability(device), []).append(device)
    ascending = [sorted(by_capability[key], key=lambda device: device.sm_count) for key in sorted(by_capability)]
    smaller = [alike[0] for alike in ascending if alike[0].sm_count < alike[-1].sm_count]
    return [alike[-1] for alike in ascending], smaller


def entry(settings: DistilSettings) -> None:
    """Distil, show a bar, print the table."""
    from conf.bars import StepBar
    from learn.workspaces.judging import table_of

    with StepBar("distilling") as bar:
        scores = distil(settings, bar.update)
    print(table_of(scores))
    print(f"{settings.path}: {settings.path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    command("distil_cudnn", entry)
