"""The engine that `deepspeed.initialize` returns in a script: it plays the first rank of the settings' ZeRO.

Start reading at `DeepSpeedJob.initialize`. DeepSpeed itself is never run: `featurize.parallel.zero` has its rules
(release 0.19), and deepspeed/runtime/engine.py is what scripts see here.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from featurize.optimizers import state_tensors
from featurize.parallel.deepspeed_config import DeepSpeedFile, read_deepspeed, settings_of
from featurize.training_settings import Training
from learn.script.choices import name_of
from learn.script.deepspeed_optimizers import EngineOptimizer, kind_of, maker_of
from learn.script.device_mode import CUDA
from learn.script.rank_zero import RankZero
from learn.script.step_watch import StepWatch

_ALONE = (
    "DeepSpeed on one GPU is not estimated; start the script on several, as in deepspeed --num_gpus 8 train.py, or "
    "leave DeepSpeed out"
)
_TWICE = "several engines of DeepSpeed in a script are not followed"
_NO_OPTIMIZER = "deepspeed.initialize is given no optimizer, and its settings have none"
_COMPILED = "compiled models are not followed under DeepSpeed; leave compile out"
_NOT_SAVED = "checkpoints of DeepSpeed were left out"
_ONE_GROUP = "assumed: all groups of the optimizer's parameters are updated as one"
_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_MARK = "ds_id"  # of a parameter that was made in parts


class DeepSpeedJob:
    """What DeepSpeed is to a script.

    Args:
        rank: The process's part.
        watch: Of the script's steps.
        note: Hears what is taken for granted.
    """

    def __init__(self, rank: RankZero, watch: StepWatch, note: Callable[[str], None]) -> None:
        self.rank, self.watch, self.note = rank, watch, note
        self._has_engine = False

    def initialize(
        self, args: Any = None, model: Any = None, optimizer: Any = None, model_parameters: Any = None,
        training_data: Any = None, lr_scheduler: Any = None, distributed_port: Any = None, mpu: Any = None,
        dist_init_required: Any = None, collate_fn: Any = None, config: Any = None, mesh_param: Any = None,
        config_params: Any = None,
    ) -> tuple[DeepSpeedEngine, Optimizer, Any, Any]:  # fmt: skip
        """As DeepSpeed's own: engine, optimizer, loader of `training_data`, scheduler."""
        if mpu is not None or mesh_param is not None:
            raise RuntimeError("model and sequence parallelism of DeepSpeed are not followed")
        if not isinstance(model, nn.Module):
            raise RuntimeError("deepspeed.initialize wants a model")
        if self._has_engine:
            raise RuntimeError(_TWICE)
        given = config if config is not None else config_params
        settings = _settings(given if given is not None else getattr(args, "deepspeed_config", None))
        self.init_distributed()
        if self.rank.launched == 1:
            raise RuntimeError(_ALONE)
        file = read_deepspeed(settings, ranks=self.rank.launched)
        trained = model_parameters if model_parameters is not None else model.parameters()
        basic = _optimizer(optimizer, list(trained), file)
        engine = DeepSpeedEngine(self, model, basic, file, settings)
        self._has_engine = True
        engine.lr_scheduler = _scheduler(lr_scheduler, basic, settings)
        if training_data is not None:
            engine.training_dataloader = engine.deepspeed_io(training_data, collate_fn=collate_fn)
        return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler

    def init_distributed(self, dist_backend: str | None = None, *_: Any, **__: Any) -> None:
        """Begin a process group, unless there is one."""
        if not dist.is_initialized():
            dist.init_process_group(dist_backend or "nccl")


class DeepSpeedEngine(nn.Module):
    """A rank's model, and what updates it.

    Args:
        job: Of the process.
        model: Which the script made.
        basic: Its optimizer, whose state is made for the rank's part.
        file: What the settings say.
        settings: Themselves.
    """

    def __init__(
        self, job: DeepSpeedJob, model: nn.Module, basic: Optimizer, file: DeepSpeedFile, settings: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self._file, self._settings, self._job = file, settings, job
        self.micro_steps = self.global_steps = self.global_samples = self.skipped_steps = 0
        self.training_dataloader: Any = None
        self.lr_scheduler: Any = None
        self._boundary: bool | None = None
        rank, accumulation = job.rank, int(file.training.get("accumulation", 1))
        layout = rank.settings(**file.zero)
        clip = file.training.get("clip_norm")
        training = Training(accumulation=accumulation, clip_norm=clip, offload_optimizer=layout.cpu_offload)
        job.note(f"DeepSpeed does not run here: its stage {layout.zero} is followed as release 0.19 has it")
        if len(basic.param_groups) > 1:
            job.note(_ONE_GROUP)
        _place(model, _TYPES.get(layout.param_dtype or ""), rank.recorder, in_parts=layout.zero == 3)
        whole = {name: (p.shape, p.numel()) for name, p in model.named_parameters()}
        played = rank.play(layout, training)
        self.module = played.wrapped(model)
        if layout.zero == 3:
            _mark_parts(model, whole)
        played.is_boundary = self.is_gradient_accumulation_boundary
        self._update = played.update(maker_of(basic))
        self.basic_optimizer, self.optimizer = basic, _ZeroOptimizer(basic)
        self.config, self.device, self.local_rank = settings, CUDA, 0
        self.global_rank, self.world_size = 0, rank.launched
        _note_choices(job.watch, basic, clip)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if any("_orig_mod" in vars(module) for module in self.modules()):
            raise RuntimeError(_COMPILED)
        return self.module(*inputs, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **_: Any) -> Tensor:
        """Run a backward pass, of a part of the step's loss, and reduce gradients as the stage does."""
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
                self._job.rank.recorder.name(state_tensors(self._update), "optimizer_state")
            self.global_steps += 1
            self.global_samples += self.train_batch_size()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
        self.micro_steps += 1

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the micro-step that runs is the last one of its step."""
        if self._boundary is not None:
            return self._boundary
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self._boundary = is_boundary

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients of stage 1 unreduced, which they are before the last micro-step anyway."""
        if self.zero_optimization_stage() > 1:
            raise RuntimeError("no_sync does not go with gradients that stages 2 and 3 spread")
        yield

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients were freed as they were reduced."""

    def train_micro_batch_size_per_gpu(self) -> int:
        micro = self._file.micro_batch
        return micro or int(self._settings.get("train_batch_size", 1)) // (
            self.gradient_accumulation_steps() * self.world_size
        )

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.world_size

    def gradient_accumulation_steps(self) -> int:
        return int(self._file.training.get("accumulation", 1))

    def gradient_clipping(self) -> float:
        return float(self._file.training.get("clip_norm", 0.0))

    def zero_optimization(self) -> bool:
        return True

    def zero_optimization_stage(self) -> int:
        return int(self._file.zero["zero"])

    def zero_optimization_partition_weights(self) -> bool:
        return self.zero_optimization_stage() == 3

    def fp16_enabled(self) -> bool:
        return self._file.zero.get("param_dtype") == "fp16"

    def bfloat16_enabled(self) -> bool:
        return self._file.zero.get("param_dtype") == "bf16"

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.basic_optimizer.param_groups]

    def get_global_grad_norm(self) -> float:
        return 1.0

    def was_step_applied(self) -> bool:
        return True

    def deepspeed_io(self, dataset: Any, batch_size: int | None = None, collate_fn: Any = None, **_: Any) -> Any:
        """Return a loader of the rank's share of a data set, in batches of a micro-step."""
        from torch.utils.data import DataLoader, DistributedSampler

        return DataLoader(
            dataset, batch_size or self.train_micro_batch_size_per_gpu(), sampler=DistributedSampler(dataset),
            collate_fn=collate_fn,
        )  # fmt: skip

    def save_checkpoint(self, *_: Any, **__: Any) -> bool:
        self._job.note(_NOT_SAVED)
        return True

    save_16bit_model = save_fp16_model = save_checkpoint

    def load_checkpoint(self, *_: Any, **__: Any) -> tuple[None, dict]:
        self._job.note(_NOT_SAVED)
        return None, {}

    def compile(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(_COMPILED)

    def destroy(self) -> None:
        pass


class _ZeroOptimizer(Optimizer):
    """The optimizer as scripts see it; its engine steps."""

    overflow = False

    def __init__(self, basic: Optimizer) -> None:
        super().__init__([dict(group) for group in basic.param_groups], basic.defaults)
        self.param_groups = basic.param_groups
        self.optimizer = basic

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("DeepSpeed's optimizer is stepped by engine.step()")

    def zero_grad(self, set_to_none: bool = True) -> None:
        pass

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)


def _settings(given: Any) -> Mapping[str, Any]:
    """Settings of a mapping, a file, or the encoded text that libraries of Hugging Face take as well.

    Raises:
        RuntimeError: There are none.
        UsageError: They cannot be read.
    """
    if given is None:
        raise RuntimeError("deepspeed.initialize is given no settings: config, or --deepspeed_config")
    if isinstance(given, str) and not Path(given).is_file():
        with contextlib.suppress(ValueError):  # neither encoded nor JSON: the path of a file that is not there
            return json.loads(base64.urlsafe_b64decode(given).decode("utf-8"))
    return settings_of(given)


def _optimizer(given: Any, trained: list[Any], file: DeepSpeedFile) -> Optimizer:
    """The script's own optimizer, or that of the settings."""
    if isinstance(given, Optimizer):
        return given
    if callable(given):
        return given(trained)
    name = file.training.get("optimizer")
    if name is None:
        raise RuntimeError(_NO_OPTIMIZER)
    return kind_of(name, name, file.training.get("implementation"))(trained)


def _scheduler(given: Any, basic: Optimizer, settings: Mapping[str, Any]) -> Any:
    """The script's own scheduler. That of the settings changes rates alone, and leaves them as they are here."""
    if given is not None and not hasattr(given, "step") and callable(given):
        return given(basic)
    if given is None and settings.get("scheduler"):
        return torch.optim.lr_scheduler.LambdaLR(basic, lambda _step: 1.0)
    return given


def _place(model: nn.Module, dtype: torch.dtype | None, recorder: Any, *, in_parts: bool) -> None:
    """Move a model to the GPU, with parameters of the settings' type; what `zero.Init` made takes nothing there."""
    parts = [p for p in model.parameters() if hasattr(p, _MARK)] if in_parts else []
    recorder.nowhere += bool(parts)
    for parameter in parts or model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(CUDA, dtype or parameter.dtype)
    recorder.nowhere -= bool(parts)
    model.to(CUDA)


def _mark_parts(model: nn.Module, whole: Mapping[str, tuple[torch.Size, int]]) -> None:
    """Let parameters of stage 3 say what they are as a whole."""
    for number, (name, parameter) in enumerate(model.named_parameters()):
        shape, count = whole[name]
        vars(parameter).update(ds_id=number, ds_shape=shape, ds_numel=count)


def _note_choices(watch: StepWatch, basic: Optimizer, clip: Any) -> None:
    seen = watch.choices.seen
    if isinstance(basic, EngineOptimizer):
        watch.optimizer_name = basic.our_name
        if basic.implementation is not None:
            seen["implementation"] = basic.implementation
    else:
        watch.optimizer_name = name_of(basic)
        watch.choices.of_optimizer(basic)
    if clip is not None:
        seen["clip_norm"] = float(clip)
