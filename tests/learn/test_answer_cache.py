"""Traces and answers that are found again: by whom, for which GPU models, and what makes another job of one."""

import contextlib
import dataclasses
import multiprocessing
import sqlite3
import sys
import threading
import types

import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import featurize.trace.tracer
from conf.files.disk_cache import DiskCache, code_version
from featurize.device.device_spec import device_names, load_device
from featurize.families import cnn
from featurize.trace import trace_cache
from featurize.trace.tracer import trace_step
from learn import devices_that_fit, estimate
from learn.estimation import answers
from learn.job.traced import key_of
from learn.job.training_job import of_module

A100, V100 = load_device("A100-SXM4-40GB"), load_device("V100-SXM2-32GB")
CONFIG = cnn.Config(batch_size=2, image_size=16, channels=3, classes=4, base_filters=8, depth=2)
WIDTH = 8


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the cache on disk."""
    monkeypatch.setenv("GPUFARM_CACHE", str(tmp_path / "a'; echo cache"))
    return tmp_path / "a'; echo cache"


@pytest.fixture
def traced(monkeypatch):
    """The steps that were traced."""
    steps = []

    def counted(*args, **kwargs):
        steps.append(args)
        return trace_step(*args, **kwargs)

    monkeypatch.setattr(featurize.trace.tracer, "trace_step", counted)
    return steps


def as_another_process():
    trace_cache.clear()
    answers.clear()


def figures(done):
    return dataclasses.replace(done, seconds=0.0)


def net():
    return nn.Sequential(nn.Linear(4, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 3))


def key(model, inputs=(2, 4), target=None, **more):
    return key_of(of_module(model, [(inputs, target)], **more))[0]


@pytest.mark.parametrize("job", [lambda: {"model": CONFIG}, lambda: {"model": net, "inputs": (2, 4)}])
def test_a_repeated_question_is_answered_without_a_trace_also_by_the_next_process(cache, traced, job):
    first = estimate(**job(), device=A100)
    assert figures(estimate(**job(), device=A100)) == figures(first) and len(traced) == 1
    as_another_process()
    assert figures(estimate(**job(), device=A100)) == figures(first) and len(traced) == 1
    elsewhere = estimate(**job(), device=V100)
    as_another_process()
    (cache / "traces.sqlite").unlink()
    assert figures(estimate(**job(), device=V100)) == figures(elsewhere) and len(traced) == 2, "a trace serves both"


def test_an_answer_that_the_caller_changes_changes_no_later_one(cache):
    estimate(CONFIG, device=A100).breakdown["context"] = 0.0
    assert estimate(CONFIG, device=A100).breakdown["context"] > 0


@pytest.mark.parametrize("content", [b"not a database", b""])
def test_a_damaged_file_is_as_none_and_is_replaced(cache, traced, content):
    cache.mkdir()
    (cache / "traces.sqlite").write_bytes(content)
    estimate(CONFIG)
    as_another_process()
    estimate(CONFIG)
    assert len(traced) == 1


def test_modules_that_are_made_alike_have_one_key():
    assert key(net) == key(net) == key(lambda: net()) != key(net())
    module = net()
    assert key(module) == key(module)


def require_different(keys):
    assert None not in keys
    assert len(set(keys)) == len(keys)


def test_whatever_a_trace_follows_from_is_in_the_key(monkeypatch):
    keys = [key(net), key(net, (3, 4)), key(net, target=(2,)), key(net, loss=lambda output, target: output.sum())]
    monkeypatch.setitem(globals(), "WIDTH", 16)  # a global that the factory reads
    module = net()
    keys += [key(net), key(module)]
    module[0] = nn.Linear(4, 16, bias=False)
    keys.append(key(module))
    module.forward = lambda x: module[2](module[0](x))
    require_different([*keys, key(module)])


def test_the_code_of_a_module_is_in_the_key_with_what_it_names(monkeypatch):
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.mask = nn.Linear(4, 4), torch.zeros(4)

        def forward(self, x):
            return self.layer(x) * WIDTH + self.mask

    module = Own()
    keys = [key(module)]
    monkeypatch.setitem(globals(), "WIDTH", 16)
    keys.append(key(module))
    module.mask[0] = 1
    keys.append(key(module))
    monkeypatch.setattr(Own, "forward", lambda self, x: self.layer(self.layer(x)))
    keys.append(key(module))
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight)
    require_different([*keys, key(module)])


def test_what_torch_and_timm_are_set_to_is_in_the_keys(monkeypatch):
    keys = [(key(net), trace_cache.config_key(CONFIG))]
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_dtype("cuda", torch.bfloat16)  # the type of a `torch.autocast` that names none
    keys.append((key(net), trace_cache.config_key(CONFIG)))
    torch.set_autocast_dtype("cuda", before)
    monkeypatch.setitem(sys.modules, "timm.layers.config", types.SimpleNamespace(_USE_FUSED_ATTN=0))
    keys.append((key(net), trace_cache.config_key(CONFIG)))
    assert len(set(keys)) == len({of_config for _, of_config in keys}) == 3
    hook = register_module_forward_hook(lambda *_: None)  # nobody knows what it does
    assert key(net) is trace_cache.config_key(CONFIG) is None
    hook.remove()


def test_what_no_text_stands_for_has_no_key(tmp_path):
    module = net()
    module.lock = threading.Lock()
    assert key(module) is None
    module = net()
    with open(tmp_path / "log", "w") as module.log:
        assert key(module) is None


NAMES = ("A100-SXM4-40GB", "H100-SXM5-80GB", "V100-SXM2-32GB", "T4", "RTX-4060", "P100-PCIE-16GB")


def stem():
    return nn.Sequential(nn.Conv2d(3, 64, 3), nn.Flatten(), nn.Linear(64 * 30 * 30, 10))


class Block(nn.Module):
    """A convolution, attention and a product: what replays and workspaces of GPU models differ in."""

    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 64, 3, padding=1), nn.Linear(64, 10)

    def forward(self, x):
        tokens = self.stem(x).flatten(2).transpose(1, 2).unflatten(-1, (4, 16)).transpose(1, 2)
        mixed = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_table_has_the_figures_of_single_answers(precision):
    job = {"inputs": (16, 3, 32, 32), "precision": precision}
    for row in devices_that_fit(Block, devices=NAMES, **job):
        alone = estimate(Block, device=row.device, **job)
        assert figures(row.estimate) == figures(alone)
        assert row.room_mib == alone.device_memory_mib - alone.upper_mib and row.fits == alone.fits_device


def check_tensors_without_memory():
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    whole = estimate(small, torch.randn(2, 8)).peak_memory_mib
    for parameter in small.parameters():
        parameter.untyped_storage().resize_(0)
    assert whole == estimate(small, torch.randn(2, 8)).peak_memory_mib


def test_tensors_without_memory_are_not_read():
    child = multiprocessing.get_context("fork").Process(target=check_tensors_without_memory)
    child.start()  # a process of its own, which reading them would end
    child.join()
    assert child.exitcode == 0


def test_entries_of_others_are_traced_anew(cache, traced):
    first = estimate(CONFIG)
    with contextlib.closing(sqlite3.connect(cache / "traces.sqlite")) as database:
        keys = [name for (name,) in database.execute("SELECT key FROM entries")]
    DiskCache(cache / "traces.sqlite").write((name, b'{"trace": [1]}') for name in keys)
    as_another_process()
    assert figures(estimate(CONFIG)) == figures(first) and len(traced) == 2


def test_hooks_of_parameters_are_in_the_key():
    def build(hook):
        model = net()
        if hook is not None:
            model[0].weight.register_post_accumulate_grad_hook(hook)
        return model

    def keeps(parameter):
        parameter.kept = parameter.grad

    def frees(parameter):
        parameter.grad = None

    keys = [key(lambda hook=hook: build(hook)) for hook in (None, keeps, frees)]
    require_different(keys)
    assert key(lambda: build(frees)) == keys[2]


def test_gpus_share_a_trace_where_none_can_differ(traced):
    devices_that_fit(Block, (16, 3, 32, 32), devices=device_names())
    assert len(traced) == 2  # an MI100 alone has no fused attention
    devices_that_fit(Block, (16, 3, 32, 32), devices=(*NAMES, "MI210", "MI300X"), precision="fp16")
    assert len(traced) == 4  # with flash attention, and without
    devices_that_fit(stem, (16, 3, 32, 32), devices=device_names(), precision="fp16")
    assert len(traced) == 5


def test_the_version_of_the_code_is_found_without_importing_it(monkeypatch):
    """Each trial is traced in a new process, where importing this package takes as long as the trace."""
    monkeypatch.delitem(sys.modules, "learn")
    assert code_version.__wrapped__() == code_version() and "learn" not in sys.modules
