"""The package `deepspeed` as a script sees it, installed or not: what trains in several processes, and no more.

Start reading at `install_deepspeed`; `learn.script.deepspeed_engine` has the engine.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import itertools
import logging
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils import checkpoint
from torch.utils.hooks import RemovableHandle

from learn.script.deepspeed_engine import DeepSpeedEngine, DeepSpeedJob, kind_of
from learn.script.device_mode import CUDA
from learn.script.fake_cuda import giving
from learn.script.loggers import is_ready_for_its_absence
from learn.script.rank_zero import RankZero
from learn.script.step_watch import StepWatch

NAME, VERSION = "deepspeed", "0.19.8"
_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]


def install_deepspeed(rank: RankZero, watch: StepWatch, note: Callable[[str], None]) -> None:
    """Give scripts a package `deepspeed` whose engine plays a rank, in this process."""
    sys.meta_path.insert(0, _Finder(_contents(DeepSpeedJob(rank, watch, note)), rank))


class _Finder(MetaPathFinder, Loader):
    """Finds the package and all modules in it, and its version.

    Where one process runs and DeepSpeed is missing, it stays missing for who is ready for that.
    """

    def __init__(self, contents: Mapping[str, Mapping[str, Any]], rank: RankZero) -> None:
        self._rank = rank
        self._modules = {name: _Part(name) for name in contents}
        for name, module in self._modules.items():
            vars(module).update(contents[name])
            package, _, leaf = name.rpartition(".")
            if package:
                vars(self._modules[package])[leaf] = module

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{NAME}."):
            return None
        if fullname == NAME and not self._is_there() and is_ready_for_its_absence():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def _is_there(self) -> bool:
        return self._rank.launched > 1 or PathFinder.find_spec(NAME) is not None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._modules.get(spec.name) or _Part(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        wanted = getattr(context, "name", None)
        return [_Distribution()] if wanted == NAME and self._is_there() else []


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` says of the package."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class _Part(types.ModuleType):
    """A module that has what it is known for. All else of DeepSpeed can be imported, and says that it is not followed
    when it is used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Part(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(
            f"{self.__name__} is not followed; estimate the model itself with the layout, as in parallel=ddp=8,zero=2"
        )

    def __mro_entries__(self, bases: tuple) -> tuple:
        return self()

    def __instancecheck__(self, instance: object) -> bool:
        return False


def _contents(job: DeepSpeedJob) -> dict[str, dict[str, Any]]:
    """Return module -> what is in it, besides the modules below it."""
    zero = {
        "Init": Init, "register_external_parameter": giving(None),
        "GatheredParameters": lambda *_, **__: contextlib.nullcontext(),  # they are whole until there is an engine
    }  # fmt: skip
    arange = {"zero_wrapper_for_fp_tensor_constructor": lambda fn, *_, **__: fn, "_orig_torch_arange": torch.arange}
    of_torch = {name: getattr(dist, name) for name in dir(dist) if not name.startswith("_")}
    within = {
        "": {
            "__version__": VERSION, "initialize": job.initialize, "init_distributed": job.init_distributed,
            "add_config_arguments": _add_arguments, "DeepSpeedEngine": DeepSpeedEngine,
        },
        ".zero": zero,
        ".comm": {**of_torch, "init_distributed": job.init_distributed},
        ".checkpointing": {"checkpoint": _checkpoint, "configure": giving(None), "is_configured": giving(True)},
        ".utils": {
            "logger": logging.getLogger("DeepSpeed"), "log_dist": giving(None), "set_z3_leaf_modules": giving(None),
        },
        ".runtime": {},
        ".runtime.zero": zero,
        ".runtime.zero.partition_parameters": {**zero, **arange},
        ".runtime.engine": {"DeepSpeedEngine": DeepSpeedEngine},
        ".runtime.lr_schedules": {"VALID_LR_SCHEDULES": _SCHEDULES},
        ".accelerator": {"get_accelerator": _Accelerator},
        ".ops": {},
        ".ops.adam": {
            "FusedAdam": kind_of("FusedAdam", "adamw", "fused"),
            "DeepSpeedCPUAdam": kind_of("DeepSpeedCPUAdam", "adamw"),
        },
        ".ops.lion": {
            "FusedLion": kind_of("FusedLion", "lion"), "DeepSpeedCPULion": kind_of("DeepSpeedCPULion", "lion"),
        },
        ".ops.adagrad": {"DeepSpeedCPUAdagrad": kind_of("DeepSpeedCPUAdagrad", "adagrad")},
    }  # fmt: skip
    return {f"{NAME}{name}": content for name, content in within.items()}


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint.checkpoint(function, *args, use_reentrant=True)


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


class Init:
    """`deepspeed.zero.Init`: what is made while it is entered never lies on a GPU as a whole."""

    _numbers = itertools.count()

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **__: Any) -> None:
        self._enabled = enabled
        self._hook: RemovableHandle | None = None
        for parameter in module.parameters() if module is not None and enabled else ():
            self._mark(parameter)

    def __enter__(self) -> Init:
        if self._enabled:
            self._hook = register_module_parameter_registration_hook(lambda _module, _name, one: self._mark(one))
        return self

    def __exit__(self, *error: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _mark(self, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            vars(parameter).update(ds_id=next(self._numbers), ds_shape=parameter.shape, ds_numel=parameter.numel())


class _Accelerator:
    """What `deepspeed.accelerator.get_accelerator()` returns: torch.cuda, with names of its own."""

    current_device_name, communication_backend_name = giving(str(CUDA)), giving("nccl")
    is_fp16_supported = giving(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def device_name(self, index: int | None = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"
