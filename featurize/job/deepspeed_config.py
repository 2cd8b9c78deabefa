"""DeepSpeed's own file of settings (ds_config.json): its settings of ZeRO and of the training. Torch-free.

Start reading at `read_deepspeed`. Names and defaults are those of DeepSpeed 0.19 (deepspeed/runtime/config.py,
deepspeed/runtime/zero/config.py); "auto" is replaced as by Hugging Face's Trainer
(transformers/integrations/deepspeed.py).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UsageError, is_finite, shown

ZERO_STAGES = (1, 2, 3)
AUTO = "auto"
_ZERO = "zero_optimization"
# Keys of zero_optimization that are fields of `featurize.job.layout.Zero` of the same name: the stages that read them,
# and the Trainer's value for "auto", from the model's width; None: it leaves the value to DeepSpeed.
_FIELDS: Mapping[str, tuple[tuple[int, ...], Callable[[int], int] | None]] = {
    "reduce_bucket_size": (ZERO_STAGES, lambda width: width * width),
    "sub_group_size": ((3,), None),
    "stage3_prefetch_bucket_size": ((3,), lambda width: int(0.9 * width * width)),
    "stage3_max_live_parameters": ((3,), None),
    "stage3_max_reuse_distance": ((3,), None),
    "stage3_param_persistence_threshold": ((3,), lambda width: 10 * width),
    "overlap_comm": (ZERO_STAGES, None),
    "contiguous_gradients": (ZERO_STAGES, None),
}
# Keys of state that can lie in host memory: the field of `Zero`, and the stages that read them.
_OFFLOADED: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "offload_optimizer": ("cpu_offload", ZERO_STAGES),
    "offload_param": ("offload_param", (3,)),
}
# Keys that change neither memory nor operators of a step.
_NO_MATTER = frozenset(
    {
        "scheduler",
        "steps_per_print",
        "wall_clock_breakdown",
        "dump_state",
        "memory_breakdown",
        "flops_profiler",
        "tensorboard",
        "wandb",
        "csv_monitor",
        "comet",
        "comms_logger",
        "checkpoint",
        "aio",
        "dataloader_drop_last",
        "zero_allow_untested_optimizer",
        "zero_force_ds_cpu_optimizer",
        "elasticity",
        "autotuning",
        "seed",
        "nebula",
        "timers",
        "activation_checkpointing",
        "disable_allgather",
        "use_node_local_storage",
        "load_universal_checkpoint",
        "gradient_predivide_factor",
        "prescale_gradients",
        "sparse_gradients",
        "fp32_allreduce",
    }
)
_NO_MATTER_OF_ZERO = frozenset(
    {
        "allgather_partitions",
        "allgather_bucket_size",
        "load_from_fp32_weights",
        "elastic_checkpoint",
        "ignore_unused_parameters",
        "legacy_stage1",
        "stage3_gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "cpu_offload_use_pin_memory",
        "pipeline_loading_checkpoint",
        "override_module_apply",
        "log_trace_cache_warnings",
        "enable_sanity_checks",
        "save_muon_momentum_buffer_in_memory",
    }
)
_READ = frozenset(
    {
        _ZERO,
        "optimizer",
        "bf16",
        "fp16",
        "gradient_clipping",
        "gradient_accumulation_steps",
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
    }
)
# Keys that are supported with one value only: another value changes the step, and is not estimated.
_ONLY: Mapping[str, Any] = {
    "reduce_scatter": True,
    "use_multi_rank_bucket_allreduce": True,
    "round_robin_gradients": False,
    "parameter_alignment": False,
    "compute_grad_norm": True,
    "zero_hpz_partition_size": 1,
    "zero_quantized_weights": False,
    "zero_quantized_nontrainable_weights": False,
    "zero_quantized_gradients": False,
    "stage3_use_all_reduce_for_fetch_params": False,
    "stage3_allgather_sequential": False,
    "stage3_module_granularity_threshold": 0,
    "memory_efficient_linear": True,
    "mics_shard_size": -1,
}
_KNOWN_OF_ZERO = frozenset({"stage", *_FIELDS, *_OFFLOADED, *_ONLY, *_NO_MATTER_OF_ZERO})
# DeepSpeed's names of optimizers, in lower case -> ours. Its Adam decays weights as AdamW does, by default.
_OPTIMIZERS = {
    "adam": "adamw",
    "adamw": "adamw",
    "torchadam": "adamw",
    "sgd": "sgd",
    "adagrad": "adagrad",
    "lion": "lion",
    "rmsprop": "rmsprop",
}


@dataclass(frozen=True, kw_only=True)
class DeepSpeedFile:
    """The settings of one file.

    zero          settings of `featurize.job.layout.Zero`, as users write them
    training      settings of `featurize.job.training_settings.Training`
    micro_batch   samples of a rank's micro-step; None if the file does not set it
    left_open     keys with "auto" that get DeepSpeed's defaults, or the job's values
    """

    zero: Mapping[str, Any]
    training: Mapping[str, Any]
    micro_batch: int | None = None
    left_open: tuple[str, ...] = ()


def read_deepspeed(
    given: Mapping[str, Any] | str | Path, *, ranks: int, hidden_size: Callable[[], int | None] | None = None
) -> DeepSpeedFile:
    """Return a job's settings from DeepSpeed's.

    Args:
        given: The settings, or the path of their JSON file.
        ranks: GPUs of the job.
        hidden_size: Returns the model's width, from which Hugging Face computes buckets for "auto"; called only then.
            None leaves them open.

    Raises:
        UsageError: The file cannot be read, or has unknown keys, wrong values, or values that are not estimated; all
            of them are named.
    """
    return _Reader(settings_of(given), ranks, hidden_size).read()


def hidden_size_of(config: object) -> int | None:
    """Return the width of a model from its `config`, as Hugging Face's Trainer finds it; None if it has none.

    Args:
        config: An object with `hidden_size`, `hidden_sizes`, or a `text_config` that has either.
    """
    for part in (config, getattr(config, "text_config", None)):
        if isinstance(size := getattr(part, "hidden_size", None), int):
            return size
        if isinstance(sizes := getattr(part, "hidden_sizes", None), list | tuple) and sizes:
            return int(max(sizes))
    return None


def settings_of(given: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    """Return settings unchanged, or those of a JSON file. Raises `UsageError` for a file that cannot be read."""
    if isinstance(given, Mapping):
        return given
    if not isinstance(given, str | Path):
        raise UsageError(f"deepspeed is a JSON file or a mapping of settings, got {type(given).__name__}")
    try:
        content = json.loads(Path(given).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"deepspeed: {shown(str(given))} is not JSON: {error}") from error
    except (OSError, ValueError) as error:  # not text, or not a path
        raise UsageError(f"deepspeed: {shown(str(given))} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise UsageError(f"deepspeed: {shown(str(given))} holds no settings by name")
    return content


class _Reader:
    """Collects the settings, and all of their problems."""

    def __init__(self, given: Mapping[str, Any], ranks: int, hidden_size: Callable[[], int | None] | None) -> None:
        self._given, self._ranks = given, ranks
        self._hidden_size = functools.cache(hidden_size or (lambda: None))
        self.zero: dict[str, Any] = {}
        self.training: dict[str, Any] = {}
        self.left_open: list[str] = []
        self.problems: list[str] = []

    def read(self) -> DeepSpeedFile:
        """Return all settings. Raises `UsageError` with every problem."""
        self._read_types()
        self._read_zero(self._block(_ZERO))
        self._read_optimizer(self._block("optimizer"))
        if (clipping := self._number("gradient_clipping")) is not None and clipping > 0:
            self.training["clip_norm"] = float(clipping)
        micro_batch = self._read_batch()
        others = {key: value for key, value in self._given.items() if key not in _READ and key not in _NO_MATTER}
        if wanted := [key for key, value in others.items() if not _is_off(value)]:
            self.problems.append(
                f"not estimated: {', '.join(map(str, wanted))}; read: {', '.join(sorted(_READ))}; ignored, as no "
                f"memory depends on it: {', '.join(sorted(_NO_MATTER))}"
            )
        if self.problems:
            raise UsageError(f"deepspeed: {'; '.join(self.problems)}")
        return DeepSpeedFile(
            zero=self.zero, training=self.training, micro_batch=micro_batch, left_open=tuple(self.left_open)
        )

    def _read_types(self) -> None:
        enabled = []
        for name in ("bf16", "fp16"):
            block = self._block(name)
            value = self._value(block, "enabled", name)
            if value not in (None, True, False):
                self.problems.append(f"{name}.enabled must be true, false or auto, got {shown(value)}")
            if value is True:
                enabled.append(name)
            others = (f"{name}_master_weights_and_grads", f"{name}_optimizer_states")
            self.problems += [f"{name}.{key} is not estimated; leave it out" for key in others if block.get(key)]
        if len(enabled) > 1:
            self.problems.append("bf16 and fp16 exclude each other: enable either")
        if enabled:
            self.zero["param_dtype"] = enabled[0]

    def _read_zero(self, block: Mapping[str, Any]) -> None:
        stage = block.get("stage", 0)
        if type(stage) is not int or stage not in ZERO_STAGES:
            self.problems.append(f"{_ZERO}.stage must be 1, 2 or 3 to be estimated, got {shown(stage)}")
            return
        self.zero["zero"] = stage
        for name in (name for name, (stages, _) in _FIELDS.items() if stage in stages):
            of_width = _FIELDS[name][1]
            if block.get(name) == AUTO and of_width and (width := self._hidden_size()) is not None:
                self.zero[name] = of_width(width)
            elif (value := self._value(block, name, _ZERO)) is not None:
                self.zero[name] = int(value) if isinstance(value, float) and value.is_integer() else value
        for name, (ours, stages) in _OFFLOADED.items():
            if self._offloads(block, name) and stage in stages:
                self.zero[ours] = True
        for name, only in _ONLY.items():
            if block.get(name, only) not in (only, AUTO):
                self.problems.append(f"{_ZERO}.{name}={shown(block[name])} is not estimated; leave it out")
        if unknown := [name for name in block if name not in _KNOWN_OF_ZERO]:
            known = ", ".join(sorted(_KNOWN_OF_ZERO))
            self.problems.append(f"{_ZERO}: not estimated: {', '.join(unknown)}; known: {known}")

    def _offloads(self, block: Mapping[str, Any], name: str) -> bool:
        value = block.get(name) or {}
        if not isinstance(value, Mapping):
            self.problems.append(f"{_ZERO}.{name} is a mapping with a device, got {shown(value)}")
            return False
        device = value.get("device", "none")
        if device not in ("none", None, "cpu"):
            self.problems.append(f"{_ZERO}.{name}.device={shown(device)} is not estimated; known: none, cpu")
        if value.get("ratio", 1) != 1 or value.get("super_offload"):
            self.problems.append(f"{_ZERO}.{name}: a part of it (ratio, super_offload) is not estimated")
        return bool(device == "cpu")

    def _read_optimizer(self, block: Mapping[str, Any]) -> None:
        name = self._value(block, "type", "optimizer")
        if name is None:
            return
        ours = _OPTIMIZERS.get(name.lower()) if isinstance(name, str) else None
        if ours is None:
            self.problems.append(
                f"optimizer.type={shown(name)} is not estimated; known: Adam, AdamW, SGD, Adagrad, Lion, RMSprop"
            )
            return
        options = params if isinstance(params := block.get("params"), Mapping) else {}
        if name.lower() == "adam" and options.get("adam_w_mode") is False:
            ours = "adam"
        if ours == "sgd" and options.get("momentum") not in (None, AUTO, 0):
            ours = "nesterov" if options.get("nesterov") is True else "momentum"
        self.training["optimizer"] = ours
        is_torchs = options.get("torch_adam") or name.lower() == "torchadam" or self.zero.get("cpu_offload", False)
        if ours in ("adam", "adamw") and not is_torchs:
            self.training["implementation"] = "fused"  # its FusedAdam makes no temporaries either

    def _read_batch(self) -> int | None:
        ranks = self._ranks
        steps, micro = (self._count(name) for name in ("gradient_accumulation_steps", "train_micro_batch_size_per_gpu"))
        if (total := self._count("train_batch_size")) is not None:
            if micro is not None and steps is None:
                steps = max(total // (micro * ranks), 1)
            if steps is not None and micro is None:
                micro = max(total // (steps * ranks), 1)
            if micro is not None and steps is not None and total != micro * steps * ranks:
                self.problems.append(
                    f"train_batch_size={total} is not micro batch {micro} x accumulation {steps} x {ranks} ranks"
                )
        if steps is not None:
            self.training["accumulation"] = steps
        return micro

    def _block(self, name: str) -> Mapping[str, Any]:
        value = self._given.get(name)
        if value is None or isinstance(value, Mapping):
            return value or {}
        self.problems.append(f"{name} is a block of settings, got {shown(value)}")
        return {}

    def _value(self, block: Mapping[str, Any], key: str, name: str) -> Any:
        if (value := block.get(key)) == AUTO:
            self.left_open.append(f"{name}.{key}" if name else key)
            return None
        return value

    def _number(self, name: str) -> float | None:
        value = self._value(self._given, name, "")
        if value is None or is_finite(value):
            return value
        self.problems.append(f"{name} must be a number or auto, got {shown(value)}")
        return None

    def _count(self, name: str) -> int | None:
        value = self._number(name)
        if value is None or (value >= 1 and value == int(value)):
            return None if value is None else int(value)
        self.problems.append(f"{name} must be a whole number >= 1, got {shown(value)}")
        return None


def _is_off(value: object) -> bool:
    """Return whether a block switches nothing on."""
    if isinstance(value, Mapping):
        return not value or value.get("enabled") is False
    return value in (None, False)
