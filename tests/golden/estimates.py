"""Estimates of 200 small jobs, of the fast method, and the allocator's moments of the golden steps.

Start reading at `cases`. A case draws by its own name, so that one that goes moves no other.
"""

import hashlib
import itertools
import json
import random
from dataclasses import replace

from torch import nn

from featurize.families import family_names
from learn import estimate, estimate_script
from tests.featurize.golden_traces import DEVICE, golden
from tests.featurize.small_configs import small_config
from tests.learn import test_script_kinds as kinds

DEVICES = (
    "A100-SXM4-40GB",
    "H100-SXM5-80GB",
    "V100-SXM2-32GB",
    "T4",
    "RTX-4090",
    "L4",
    "P100-PCIE-16GB",
    "B200-SXM-180GB",
    "MI300X",
    "RTX-3060",
)
OF_FAMILIES = ({}, {"loop": "pipeline"}, {"parallel": "ddp=8"}, {"estimator": "trace"}, {"parallel": "fsdp=4"})
FAST = ("mlp", "cnn", "transformer")
MIXTURE = {
    "family": "moe",
    "batch_size": 4,
    "vocabulary_size": 1000,
    "sequence_length": 128,
    "embedding_size": 128,
    "heads": 2,
    "depth": 2,
    "feed_forward": 512,
    "experts": 8,
}


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=1000, num_key_value_heads=4, use_cache=False, **sizes))


def _blocks(make):
    return nn.Sequential(*(make(number) for number in range(4)))


def _convolution(number):
    return nn.Sequential(nn.Conv2d(32 if number else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())


NETS = {  # name -> factory, and what the estimate is told of its inputs
    "perceptron": (
        lambda: nn.Sequential(_blocks(lambda _: nn.Sequential(nn.Linear(256, 256), nn.ReLU())), nn.Linear(256, 16)),
        {"inputs": [64, 256]},
    ),
    "convolutions": (
        lambda: nn.Sequential(_blocks(_convolution), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
        {"inputs": [8, 3, 48, 48]},
    ),
    "recurrent": (kinds.Recurrent, {"inputs": [16, 64], "input_dtype": "int64"}),
    "tokens": (
        lambda: nn.Sequential(
            nn.Embedding(1000, 128),
            _blocks(lambda _: nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)),
            nn.Linear(128, 1000),
        ),
        {"inputs": [8, 64], "input_dtype": "int64"},
    ),
    "llama": (llama, {"inputs": {"input_ids": [4, 256], "labels": [4, 256]}, "input_dtype": "int64"}),
}
# Of each, two nets in turn and the blocks of `tokens`.
SETTINGS = (
    {},
    {"precision": "tf32"},
    {"precision": "bf16"},
    {"precision": "fp16", "clip_norm": 1.0},
    {"precision": "bf16-true"},
    {"optimizer": "sgd"},
    {"optimizer": "momentum", "implementation": "loop"},
    {"optimizer": "adamw", "implementation": "fused"},
    {"optimizer": "adafactor"},
    {"optimizer": "lion"},
    {"accumulation": 4},
    {"accumulation": 2, "zero_grad": "after_forward"},
    {"checkpointing": "full"},
    {"checkpointing": "selective", "precision": "bf16"},
    {"checkpointing": "full", "checkpoint_every": 2},
    {"compile": True},
    {"compile": "reduce-overhead", "precision": "bf16"},
    {"compile": True, "checkpointing": "full"},
    {"offload_activations": True},
    {"offload_optimizer": True},
    {"optimizer_in_backward": True},
    {"ema": True},
    {"loop": "pipeline"},
    {"loop": "resident", "estimator": "trace"},
    {"float8": "tensorwise", "precision": "bf16"},
    {"allocator": "expandable_segments:True"},
    {"machine": "eager"},
    {"coverage": 0.9},
    {"cudnn_benchmark": True},
    {"channels_last": True},
    {"power_limit_w": 250, "device": "A100-SXM4-40GB"},
    {"framework": "graphs"},
)
LAYOUTS = (
    "ddp=8",
    "ddp=16,gpus_per_node=8",
    "ddp=4,static_graph=true",
    "ddp=8,gradient_as_bucket_view=true,bucket_cap_mb=5",
    "fsdp=8",
    "fsdp=16",
    "fsdp=8,reshard_after_forward=false",
    "fsdp=8,param_dtype=bf16,reduce_dtype=fp32",
    "fsdp=8,cpu_offload=true",
    "fsdp=8,fsdp_version=1",
    "fsdp=8,fsdp_version=1,backward_prefetch=none",
    "ddp=2,fsdp=4",
    "zero=1,ddp=8",
    "zero=2,ddp=8,param_dtype=bf16",
    "zero=3,ddp=8",
    "zero=3,ddp=8,offload_param=true,cpu_offload=true",
    "tp=2",
    "tp=4,fsdp=2",
    "cp=2",
    "cp=2,fsdp=2,cp_rotate=alltoall",
    "pp=2",
    "pp=4,schedule=gpipe,micro_batches=4",
    "pp=2,schedule=interleaved",
    "pp=2,ddp=2",
    "pp=2,fsdp=2",
    "pp=2,tp=2",
    "pp=2,fsdp=2,tp=2",
)
UNDER_LAYOUTS = (
    {"parallel": "ddp=8", "accumulation": 4},
    {"parallel": "fsdp=8", "checkpointing": "full", "precision": "bf16"},
    {"parallel": "fsdp=8", "compile": True},
    {"parallel": "tp=2", "precision": "bf16-true"},
    {"parallel": "pp=2", "accumulation": 2},
    {"parallel": "pp=2", "checkpointing": "full"},
    {"parallel": "ddp=8", "loop": "pipeline"},
    {"parallel": "cp=2", "optimizer": "sgd", "precision": "bf16"},
    {"parallel": "zero=2,ddp=8", "clip_norm": 1.0},
)
ON_CONVOLUTIONS = (
    *({"known": [{"batch_size": 8, "memory_mib": 1200, "kind": kind}]} for kind in ("process", "card", "reserved")),
    {"known": [{"batch_size": 16, "memory_mib": 900}, {"batch_size": 4, "memory_mib": 700}]},
    {"known": [{"batch_size": 8, "memory_mib": 1200, "device": "T4"}], "loop": "pipeline"},
    {"workspaces": "cudnn"},
    {"workspaces": "cudnn", "precision": "fp16", "channels_last": True},
    {"workspaces": "cudnn", "cudnn_benchmark": True, "device": "H100-SXM5-80GB"},
    {"estimator": "dnnmem"},
    {"estimator": "llmem", "precision": "bf16"},
    {"estimator": "horus"},
    {"estimator": "faketensor"},
)
COMMANDS = (
    "python plain_amp.py --amp none",
    "python plain_amp.py --amp fp16",
    "python rnn_loop.py",
    "python nanogpt_like.py",
    "python torchvision_like.py --wd 0",
    "python timm_like.py",
    "python hf_trainer.py --bf16",
    "python accelerate_loop.py",
    "torchrun --nproc_per_node 8 torchrun_ddp.py",
    "torchrun --nproc_per_node 4 torchrun_fsdp2.py",
    "torchrun --nproc_per_node 8 torchrun_fsdp1.py",
    "torchrun --nproc_per_node 2 torchrun_tensor_parallel.py",
)


def cases():
    """Return the name of each case -> what estimates it."""
    found = {}

    def add(job, settings, model, **given):
        name = ", ".join([job, *(f"{key}={value}" for key, value in settings.items() if key != "device")])
        device = random.Random(name).choice(DEVICES)
        asked = {"device": device, **given, **settings}
        found[f"{name} on {asked['device']}"] = lambda: estimate(model(), **asked)

    def add_net(net, settings):
        factory, given = NETS[net]
        add(net, settings, lambda: factory, **given)

    for family, (index, settings) in itertools.product(family_names(), enumerate(OF_FAMILIES)):
        changed = {"channels_last": False} if index == 4 else {}  # FSDP shards contiguous parameters only
        add(f"{family} {index}", settings, lambda f=family, i=index, c=changed: replace(small_config(f, i), **c))
    for at, settings in enumerate(SETTINGS):
        for net in sorted({[*NETS][at % len(NETS)], "tokens"}):
            add_net(net, settings)
    for settings in (*({"parallel": layout} for layout in LAYOUTS), *UNDER_LAYOUTS):
        add_net("llama", settings)
    for layout in ("ep=2,fsdp=4", "ep=4,fsdp=4"):
        add("mixture", {"parallel": layout}, lambda: MIXTURE)
    for settings in (*ON_CONVOLUTIONS, *({"device": device} for device in DEVICES)):
        add_net("convolutions", settings)
    for batches in ([32, 64, 64, 128], {64: 0.75, 256: 0.25}):
        add_net("tokens", {"batches": batches})
    for command in COMMANDS:
        words = [str(kinds.SCRIPTS / word) if word.endswith(".py") else word for word in command.split()]
        found[command] = lambda words=words: estimate_script(words)
    return found


def answer(asked):
    """Return an estimate's mapping without the warnings, which are its notes' texts."""
    mapping = asked().to_mapping()
    texts = [note["text"] for note in mapping["notes"]]
    return {key: value for key, value in mapping.items() if (key, value) != ("warnings", texts)}


def estimates():
    """Yield the full estimate of each case."""
    from featurize.nets.vision import mend_torchvision

    mend_torchvision()
    for name, asked in cases().items():
        yield name, lambda asked=asked: answer(asked)


def fast_estimates():
    """Yield the answers of method=fast beside the full ones, whose place they take."""
    for family, index, device in itertools.product(FAST, range(3), DEVICES[:2]):
        for method in ("fast", "full"):
            yield (
                f"{family} {index} on {device}, {method}",
                lambda f=family, i=index, d=device, m=method: answer(
                    lambda: estimate(small_config(f, i), device=d, method=m)
                ),
            )


def allocator_events():
    """Yield the peaks of each golden step in the allocator, and its moments as a count and a hash."""
    for name, case in golden()["cases"].items():
        yield name, lambda config=case["config"]: _moments(config)


def _moments(config):
    from featurize.configs.trial import config_of_user
    from featurize.device.device_spec import load_device
    from featurize.memory.replay import replay
    from featurize.trace.tracer import trace_config

    spec, trial = load_device(DEVICE), config_of_user(config)
    trace = trace_config(trial, device=spec)
    profile = replay(trace, spec, cudnn_benchmark=trial.cudnn_benchmark, timeline=True)
    moments = [(moment.step, moment.phase, moment.allocated, moment.reserved) for moment in profile.timeline]
    return {
        "events": len(trace.events),
        "blocks": len(trace.blocks),
        "moments": len(moments),
        "sha256": hashlib.sha256(json.dumps(moments).encode()).hexdigest()[:16],
        "peak_allocated": profile.peak_allocated,
        "peak_reserved": profile.peak_reserved,
        "peak_operator": profile.peak_operator,
        "peak_parts": dict(profile.peak_parts),
    }
