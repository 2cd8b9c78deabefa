"""The package `deepspeed` as a script sees it, installed or not: the part that trains in several processes.

Start reading at `install_deepspeed`, then at `DeepSpeedJob.initialize`. DeepSpeed itself never runs: an engine
simulates the first rank of the settings' ZeRO, by the rules of `featurize.training.zero` (release 0.19). Its interface
is that of deepspeed/runtime/engine.py.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import functools
import importlib.metadata
import inspect
import itertools
import json
import logging
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer
from torch.utils import checkpoint
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.hooks import RemovableHandle

from featurize.job.deepspeed_config import DeepSpeedFile, read_deepspeed, settings_of
from featurize.job.training_settings import Training
from featurize.operators.own_operators import elements
from featurize.training.training_step import make_optimizer, state_tensors
from learn.script.containment import is_ready_for_its_absence
from learn.script.fake_cuda import CUDA, giving
from learn.script.process_group import RankZero
from learn.script.records import note
from learn.script.script_recorder import StepWatch

NAME, VERSION = "deepspeed", "0.19.8"
_NOT_SAVED = "checkpoints of DeepSpeed were left out"
_SCHEDULES = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def install_deepspeed(rank: RankZero, watch: StepWatch) -> None:
    """Install a package `deepspeed` whose engine simulates a rank, in this process."""
    sys.meta_path.insert(0, _Finder(_contents(DeepSpeedJob(rank, watch)), rank))


class DeepSpeedJob:
    """The functions of DeepSpeed that a script calls first."""

    def __init__(self, rank: RankZero, watch: StepWatch) -> None:
        self.rank, self.watch = rank, watch

    def initialize(
        self,
        args: Any = None,
        model: Any = None,
        optimizer: Any = None,
        model_parameters: Any = None,
        training_data: Any = None,
        lr_scheduler: Any = None,
        distributed_port: Any = None,
        mpu: Any = None,
        dist_init_required: Any = None,
        collate_fn: Any = None,
        config: Any = None,
        mesh_param: Any = None,
        config_params: Any = None,
    ) -> tuple[DeepSpeedEngine, Optimizer, Any, Any]:
        """Return the result of DeepSpeed's function: engine, optimizer, loader of `training_data`, scheduler."""
        if mpu is not None or mesh_param is not None:
            raise RuntimeError("model and sequence parallelism of DeepSpeed are not followed")
        if not isinstance(model, nn.Module):
            raise RuntimeError("deepspeed.initialize wants a model")
        if self.rank.parameters:
            raise RuntimeError("several engines of DeepSpeed in a script are not followed")
        given = config if config is not None else config_params
        settings = _settings(given if given is not None else getattr(args, "deepspeed_config", None))
        self.init_distributed()
        if self.rank.launched == 1:
            raise RuntimeError(
                "DeepSpeed on one GPU is not estimated; start the script on several, as in deepspeed --num_gpus 8 "
                "train.py, or leave DeepSpeed out"
            )
        file = read_deepspeed(settings, ranks=self.rank.launched)
        trained = model_parameters if model_parameters is not None else model.parameters()
        basic = _optimizer(optimizer, list(trained), file)
        engine = DeepSpeedEngine(self, model, basic, file, settings)
        engine.lr_scheduler = _scheduler(lr_scheduler, basic, settings)
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
        return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler

    def init_distributed(self, dist_backend: str | None = None, *_: Any, **__: Any) -> None:
        """Create a process group, unless there is one."""
        if not dist.is_initialized():
            dist.init_process_group(dist_backend or "nccl")


class DeepSpeedEngine(nn.Module):
    """A rank's model and its update.

    Args:
        job: The process's job.
        model: The script's model.
        basic: The wrapped optimizer, whose state is made for the rank's part.
        file: The parsed settings.
        settings: The settings as a mapping.
    """

    def __init__(
        self, job: DeepSpeedJob, model: nn.Module, basic: Optimizer, file: DeepSpeedFile, settings: Mapping[str, Any]
    ) -> None:
        super().__init__()
        rank, ranks = job.rank, job.rank.launched
        self._job = job
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.training_dataloader: Any = None
        self.lr_scheduler: Any = None
        self._boundary: bool | None = None
        accumulation, clip = int(file.training.get("accumulation", 1)), file.training.get("clip_norm")
        layout = rank.settings(**file.zero)
        micro_batch = file.micro_batch or int(settings.get("train_batch_size", 1)) // (accumulation * ranks)
        for name, value in {
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": clip or 0.0,
            "zero_optimization": True,
            "zero_optimization_stage": layout.zero.stage,
            "zero_optimization_partition_weights": layout.zero.stage == 3,
            "fp16_enabled": layout.zero.param_dtype == "fp16",
            "bfloat16_enabled": layout.zero.param_dtype == "bf16",
            "get_global_grad_norm": 1.0,
            "was_step_applied": True,
            "train_micro_batch_size_per_gpu": micro_batch,
            "train_batch_size": micro_batch * accumulation * ranks,
        }.items():
            setattr(self, name, giving(value))
        training = Training(accumulation=accumulation, clip_norm=clip, offload_optimizer=layout.zero.cpu_offload)
        note(f"DeepSpeed does not run here: its stage {layout.zero.stage} is followed as release 0.19 has it")
        if len(basic.param_groups) > 1:
            note("assumed: all groups of the optimizer's parameters are updated as one")
        _place(model, _TYPES.get(layout.zero.param_dtype or ""), rank.recorder, in_parts=layout.zero.stage == 3)
        for number, parameter in enumerate(model.parameters() if layout.zero.stage == 3 else ()):
            _note_full_shape(parameter, number)
        played = rank.play(layout, training, elements(model))
        self.module = played.wrap_model(model)
        played.is_boundary = self.is_gradient_accumulation_boundary
        self._update = played.update(maker_of(basic))
        self.basic_optimizer, self.optimizer = basic, _ZeroOptimizer(basic)
        self.config, self.device, self.local_rank = settings, CUDA, 0
        self.global_rank, self.world_size = 0, ranks
        job.watch.note_optimizer(basic)
        if clip is not None:
            job.watch.seen["clip_norm"] = float(clip)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if any("_orig_mod" in vars(module) for module in self.modules()):
            self.compile()
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any) -> Tensor:
        """Run the backward pass of a part of the step's loss, and reduce gradients as the stage does."""
        micro_steps = self.gradient_accumulation_steps()
        if scale_wrt_gas and micro_steps > 1:
            loss = loss / micro_steps
        loss.backward(retain_graph=retain_graph)
        return loss

    def step(self, *_: Any, **__: Any) -> None:
        """Update the model after the last micro-step of a step."""
        if self.is_gradient_accumulation_boundary():
            with self._job.watch.updating():
                self._update.step()
                self._job.rank.recorder.memory.name(state_tensors(self._update), "optimizer_state")
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the current micro-step is the last one of its step."""
        if self._boundary is not None:
            return self._boundary
        return bool((self.micro_steps + 1) % self.gradient_accumulation_steps() == 0)

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of stage 1 unreduced, as they are before the last micro-step anyway."""
        if self.zero_optimization_stage() > 1:
            raise RuntimeError("no_sync does not go with gradients that stages 2 and 3 spread")
        yield

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.basic_optimizer.param_groups]

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None, **_: Any) -> Any:
        """Return a loader of the rank's share of a data set, in batches of a micro-step."""
        return DataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            sampler=DistributedSampler(dataset),
            collate_fn=collate_fn,
        )

    def save_checkpoint(self, *_: Any, **__: Any) -> bool:
        note(_NOT_SAVED)
        return True

    save_16bit_model = save_fp16_model = save_checkpoint

    def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, dict[str, Any]]:
        note(_NOT_SAVED)
        return None, {}

    def compile(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("compiled models are not followed under DeepSpeed; leave compile out")

    zero_grad = destroy = giving(None)  # gradients are freed as they are reduced


class EngineOptimizer(Optimizer):
    """An optimizer of DeepSpeed's: it holds the settings from which the engine makes an optimizer, and has no state.

    our_name        its name in `featurize.training.training_step`
    implementation  its implementation there; None: the default one
    """

    our_name = "adamw"
    implementation: str | None = None

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, *_: Any, weight_decay: float = 0.0, **options: Any
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "fused": self.implementation == "fused" or None}
        )
        if not (options.get("adam_w_mode", True) and options.get("adamw_mode", True)):
            self.our_name = "adam"  # decays weights as AdamW does, by default

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError(
            "optimizers of deepspeed.ops are followed within deepspeed.initialize only; without it, take one of "
            "torch.optim"
        )


def kind_of(name: str, our_name: str, implementation: str | None = None) -> type[EngineOptimizer]:
    """Return a class of optimizers under the name that a script imports."""
    return type(name, (EngineOptimizer,), {"our_name": our_name, "implementation": implementation})


def maker_of(optimizer: Optimizer) -> Callable[[list[nn.Parameter]], Optimizer]:
    """Return a function that makes an optimizer of the same kind, with the settings of the first group, for other
    parameters."""
    if isinstance(optimizer, EngineOptimizer):
        return functools.partial(make_optimizer, optimizer.our_name, implementation=optimizer.implementation)
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {
        name: value for name, value in optimizer.param_groups[0].items() if name in accepted and name != "params"
    }
    return lambda parameters: type(optimizer)(parameters, **options)


class _ZeroOptimizer(Optimizer):
    """The optimizer that scripts see; its engine steps it."""

    overflow = False

    def __init__(self, basic: Optimizer) -> None:
        super().__init__([dict(group) for group in basic.param_groups], basic.defaults)
        self.param_groups = basic.param_groups
        self.optimizer = basic

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("DeepSpeed's optimizer is stepped by engine.step()")

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    zero_grad = giving(None)


def _settings(given: Any) -> Mapping[str, Any]:
    """Return settings from a mapping, a file, or encoded text, which Hugging Face's libraries also pass. Raises
    `UsageError` if they cannot be read."""
    if given is None:
        raise RuntimeError("deepspeed.initialize is given no settings: config, or --deepspeed_config")
    if isinstance(given, str) and not Path(given).is_file():
        with contextlib.suppress(ValueError):  # neither encoded nor JSON: the path of a file that does not exist
            return cast("Mapping[str, Any]", json.loads(base64.urlsafe_b64decode(given).decode("utf-8")))
    return settings_of(given)


def _optimizer(given: Any, trained: list[Any], file: DeepSpeedFile) -> Optimizer:
    """Return the script's own optimizer, or the one that the settings name."""
    if isinstance(given, Optimizer):
        return given
    if callable(given):
        return cast("Optimizer", given(trained))
    if (name := file.training.get("optimizer")) is None:
        raise RuntimeError("deepspeed.initialize is given no optimizer, and its settings have none")
    return kind_of(name, name, file.training.get("implementation"))(trained)


def _scheduler(given: Any, basic: Optimizer, settings: Mapping[str, Any]) -> Any:
    """Return the script's own scheduler. One from the settings changes only rates, which are not simulated."""
    if given is not None and not hasattr(given, "step") and callable(given):
        return given(basic)
    if given is None and settings.get("scheduler"):
        return torch.optim.lr_scheduler.LambdaLR(basic, lambda _step: 1.0)
    return given


def _place(model: nn.Module, dtype: torch.dtype | None, recorder: Any, *, in_parts: bool) -> None:
    """Move a model to the GPU, with parameters of the settings' type; those made in `zero.Init` take no memory
    there."""
    parts = [p for p in model.parameters() if hasattr(p, "ds_id")] if in_parts else []
    recorder.memory.nowhere += bool(parts)
    for parameter in parts or model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(CUDA, dtype or parameter.dtype)
    recorder.memory.nowhere -= bool(parts)
    model.to(CUDA)


# -- the package


class _Finder(MetaPathFinder, Loader):
    """Finds the package, all modules in it, and its version.

    Where one process runs and DeepSpeed is missing, it stays missing for imports that handle that.
    """

    def __init__(self, contents: Mapping[str, Any], rank: RankZero) -> None:
        self._rank, self._modules = rank, dict[str, _Part]()
        for path, value in contents.items():
            module, _, name = f"{NAME}.{path}".rpartition(".")
            vars(self._module(module))[name] = value

    def _module(self, name: str) -> _Part:
        if name not in self._modules:
            self._modules[name] = _Part(name)
            package, _, leaf = name.rpartition(".")
            if package:
                vars(self._module(package))[leaf] = self._modules[name]
        return self._modules[name]

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if not f"{fullname}.".startswith(f"{NAME}."):
            return None
        if fullname == NAME and not self._is_there() and is_ready_for_its_absence():
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def _is_there(self) -> bool:
        return self._rank.launched > 1 or PathFinder.find_spec(NAME) is not None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return self._module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...

    def find_distributions(self, context: Any = None) -> Iterable[importlib.metadata.Distribution]:
        return [_Distribution()] if getattr(context, "name", None) == NAME and self._is_there() else []


class _Distribution(importlib.metadata.Distribution):
    """Metadata of the package, for `importlib.metadata`."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {NAME}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(path)


class _Part(types.ModuleType):
    """A module with the attributes that are supported. All others can be imported, and raise an error when they are
    used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Part(f"{self.__name__}.{name}")

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"{self.__name__} is not followed; estimate the model itself with the layout, as in parallel=ddp=8,zero=2"
        )

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self()

    def __instancecheck__(self, instance: object) -> bool:
        return False


def _contents(job: DeepSpeedJob) -> dict[str, Any]:
    """Return the supported attributes by their paths in the package."""
    do_nothing = giving(None)
    zero = {
        "Init": Init,
        "register_external_parameter": do_nothing,
        "GatheredParameters": lambda *_, **__: contextlib.nullcontext(),  # without an engine they are not partitioned
    }
    return {
        "__version__": VERSION,
        "initialize": job.initialize,
        "init_distributed": job.init_distributed,
        "add_config_arguments": _add_arguments,
        "DeepSpeedEngine": DeepSpeedEngine,
        "runtime.engine.DeepSpeedEngine": DeepSpeedEngine,
        **{f"zero.{name}": value for name, value in zero.items()},
        **{f"runtime.zero.{name}": value for name, value in zero.items()},
        **{f"runtime.zero.partition_parameters.{name}": value for name, value in zero.items()},
        "runtime.zero.partition_parameters.zero_wrapper_for_fp_tensor_constructor": lambda fn, *_, **__: fn,
        "runtime.zero.partition_parameters._orig_torch_arange": torch.arange,
        "runtime.lr_schedules.VALID_LR_SCHEDULES": _SCHEDULES,
        **{f"comm.{name}": getattr(dist, name) for name in dir(dist) if not name.startswith("_")},
        "comm.init_distributed": job.init_distributed,
        "checkpointing.checkpoint": _checkpoint,
        "checkpointing.configure": do_nothing,
        "checkpointing.is_configured": giving(True),
        "utils.logger": logging.getLogger("DeepSpeed"),
        "utils.log_dist": do_nothing,
        "utils.set_z3_leaf_modules": do_nothing,
        "accelerator.get_accelerator": _Accelerator,
        "ops.adam.FusedAdam": kind_of("FusedAdam", "adamw", "fused"),
        "ops.adam.DeepSpeedCPUAdam": kind_of("DeepSpeedCPUAdam", "adamw"),
        "ops.lion.FusedLion": kind_of("FusedLion", "lion"),
        "ops.lion.DeepSpeedCPULion": kind_of("DeepSpeedCPULion", "lion"),
        "ops.adagrad.DeepSpeedCPUAdagrad": kind_of("DeepSpeedCPUAdagrad", "adagrad"),
    }


def _checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    return checkpoint.checkpoint(function, *args, use_reentrant=True)


def _add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    group = parser.add_argument_group("DeepSpeed")
    group.add_argument("--deepspeed", default=False, action="store_true")
    group.add_argument("--deepspeed_config", default=None, type=str)
    return parser


class Init:
    """`deepspeed.zero.Init`: parameters that are made while it is entered never lie on a GPU in full."""

    _numbers = itertools.count()
    _hook: RemovableHandle | None = None

    def __init__(self, module: nn.Module | None = None, *_: Any, enabled: bool = True, **__: Any) -> None:
        self._enabled = enabled
        for parameter in module.parameters() if module is not None and enabled else ():
            self._mark(parameter)

    def __enter__(self) -> Init:
        if self._enabled:
            self._hook = register_module_parameter_registration_hook(
                lambda _module, _name, parameter: self._mark(parameter)
            )
        return self

    def __exit__(self, *error: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _mark(self, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            _note_full_shape(parameter, next(self._numbers))


def _note_full_shape(parameter: nn.Parameter, number: int) -> None:
    """Set the attributes from which scripts read a parameter's shape while it is not gathered."""
    vars(parameter).update(ds_id=number, ds_shape=parameter.shape, ds_numel=parameter.numel())


class _Accelerator:
    """The accelerator of `deepspeed.accelerator.get_accelerator()`: torch.cuda under other names."""

    current_device_name, communication_backend_name = giving(str(CUDA)), giving("nccl")
    is_fp16_supported = giving(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def device_name(self, index: int | None = None) -> str:
        return "cuda" if index is None else f"cuda:{index}"
