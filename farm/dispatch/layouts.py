"""How the trials of a search space are spread over GPUs: the dimension `parallel`, and what a space's values need.

Start reading at `with_layouts`; `require_gpus` and `require_optimizers` refuse what a device cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from conf.errors import EnvironmentProblem, UsageError
from conf.files.identity import version_of
from farm.dispatch.cluster_settings import ClusterSettings
from farm.sampling.dimensions import Choice, Constant, Dimension, Scalar, Space
from featurize.job.layout import EXPERTS, MODES, OWN, WRAPPED, Parallel, parse_parallel
from featurize.job.trial_config import OPTIMIZERS
from featurize.operators.torch_releases import require_torch
from featurize.training.releases import require_traceable
from workers.devices import DeviceChoice, make_device

DIMENSION = "parallel"


def with_layouts(space: Space, given: Any) -> Space:
    """Return the space with `given` in place of its own dimension `parallel`.

    Args:
        given: A layout as `parse_parallel` takes it, or a list of them, of which None is one GPU.

    Raises:
        UsageError: Something that is no layout.
    """
    several = isinstance(given, Sequence) and not isinstance(given, str)
    layouts = [parse_parallel(one) for one in (given if several else [given])]
    if not layouts:
        raise UsageError("parallel: the list of layouts is empty")
    texts = tuple(None if layout is None else layout.text() for layout in layouts)
    dimension: Dimension = Choice(DIMENSION, texts) if several else Constant(DIMENSION, texts[0])
    others = tuple(one for one in space.dimensions if one.name != DIMENSION)
    # One GPU is what a space without the dimension means, and its jobs keep their ids.
    return replace(space, dimensions=others if texts == (None,) else (*others, dimension))


def require_gpus(space: Space, choice: DeviceChoice, cluster: ClusterSettings) -> None:
    """Refuse a layout that the device cannot run.

    Args:
        choice: Where the trials run. Simulated GPUs are as many as a layout wants.
        cluster: Where they run: the GPUs of this machine can be counted, those of a joined cluster not yet.

    Raises:
        UsageError: A pipeline on real GPUs, several nodes, or more GPUs than there are.
        EnvironmentProblem: The installed torch is too old for its trace, or for FSDP2 on the CPU.
    """
    layouts = [layout for value in _values(space, DIMENSION) if (layout := parse_parallel(value)) is not None]
    if choice.backend == "simulated" or not layouts:
        for layout in layouts:
            require_traceable(layout)
        return
    for layout in layouts:
        if not_run := [mode for mode in (*MODES, EXPERTS, OWN) if mode not in WRAPPED and getattr(layout, mode) > 1]:
            raise UsageError(
                f"parallel={layout.text()}: {', '.join(not_run)} does not run on real devices yet; modes that do: "
                f"{', '.join(WRAPPED)}; simulate it with device=A100-SXM4-40GB"
            )
        if layout.fsdp > 1 and choice.backend == "cpu":
            require_torch("2.8", "parallel: fsdp with device=cpu")
        if layout.replicates and layout.tp > 1:
            raise UsageError(
                f"parallel={layout.text()}: on real devices ddp with tp needs fsdp, as in ddp=2,fsdp=4,tp=2; simulate "
                "it with device=A100-SXM4-40GB"
            )
        if layout.zero:
            raise UsageError(
                f"parallel={layout.text()}: real ranks do not run DeepSpeed; simulate it with device=A100-SXM4-40GB"
            )
        if layout.nodes > 1:
            raise UsageError(
                f"parallel={layout.text()}: {layout.ranks} ranks fill {layout.nodes} nodes of {layout.gpus_per_node}, "
                "and a trial runs on one; set gpus_per_node, or simulate it with device=A100-SXM4-40GB"
            )
    if choice.backend == "cuda" and cluster.address is None:
        gpus = 1 if cluster.kind == "inline" else len(make_device(choice).slots())
        if (problem := gpu_problem(max(layouts, key=lambda layout: layout.ranks), gpus)) is not None:
            raise UsageError(problem)


def gpu_problem(layout: Parallel, gpus: int) -> str | None:
    """Return why a trial cannot run where the largest node has so many GPUs; None if it can."""
    if layout.ranks <= gpus:
        return None
    return f"parallel={layout.text()} needs {layout.ranks} GPUs of one node, and the largest node has {gpus}"


def require_optimizers(space: Space, choice: DeviceChoice) -> None:
    """Raise for optimizers that the device cannot run.

    Raises:
        UsageError: They run on CUDA only, and trials run on the CPU.
        EnvironmentProblem: Their package is missing here. A simulated GPU needs none for those of CUDA.
    """
    for name in _values(space, "optimizer"):
        optimizer = OPTIMIZERS[str(name)]
        if optimizer.cuda_only and choice.backend == "cpu":
            choices = ", ".join(known for known, other in OPTIMIZERS.items() if not other.cuda_only)
            raise UsageError(f"optimizer={name} runs on CUDA only; with device=cpu choose among {choices}")
        if optimizer.package is None or (optimizer.cuda_only and choice.backend == "simulated"):
            continue
        if version_of(optimizer.package) is None:
            raise EnvironmentProblem(f"optimizer={name} needs {optimizer.package}: pip install {optimizer.package}")


def _values(space: Space, name: str) -> tuple[Scalar, ...]:
    for dimension in space.dimensions:
        if dimension.name == name:
            return dimension.choices if isinstance(dimension, Choice) else (dimension.value(0.0),)
    return ()
