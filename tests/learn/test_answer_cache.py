"""Traces and answers that are found again: by whom, for which GPU models, and what makes another job of one."""

import contextlib
import dataclasses
import gc
import sqlite3
import subprocess
import sys
import threading
import types
import weakref
from collections import OrderedDict

import msgpack
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import featurize.trace.tracer
from conf.files import disk_cache
from conf.files.disk_cache import DiskCache, keep, recall
from conf.files.identity import aside_folder
from featurize.device.device_spec import load_device
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


def test_the_hash_that_a_language_model_holds_of_its_settings_is_not_in_its_key():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=8))
    fresh = key(model)
    model.generation_config._original_object_hash += 1  # as in another process
    assert key(model) == fresh
    model.generation_config.max_new_tokens = 7
    assert key(model) != fresh


def test_a_library_that_is_kept_aside_counts_as_installed():
    module = types.ModuleType("torchvision.models")
    module.__file__ = str(aside_folder() / "torchvision" / "models" / "__init__.py")
    assert trace_cache.is_installed(module)


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


class Scale(nn.Module):
    """Holds one of everything that a fingerprint reads of a module."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.chain = nn.Sequential(nn.ReLU(), nn.Tanh())
        self.wide = nn.Parameter(torch.zeros(3, 100))
        self.register_buffer("mask", torch.zeros(4))
        self.offset = torch.zeros(4, dtype=torch.int64)
        self.parts = [torch.zeros(4)]
        self.factor, self.kernel, self.shift = 1, (1, 1), 0.0
        self.sizes, self.names, self.kept = [1, 2], {"x", "y"}, {}
        self.options = {"p": 1}
        self.act = lambda x: x * self.factor
        self.hooked = False

    def forward(self, x):
        return self.second(self.norm(self.first(x)) * self.factor * WIDTH + self.mask)


class Twice(Scale):
    def forward(self, x):
        return super().forward(super().forward(x))


def filled(tensor):
    tensor.numpy()[0] = 1  # which PyTorch's counter of versions misses


def grown(module):
    module.first.weight.data = torch.zeros(4, 5)


def named_again(module):
    module.ratio = vars(module).pop("factor")


def in_another_order(module):
    module.chain._modules["0"] = module.chain._modules.pop("0")


def tied(module):
    module.second.weight = module.first.weight


def swapped(module):
    torch.utils.swap_tensors(module.wide, nn.Parameter(torch.zeros(5, 100)))


CHANGES = {
    "mode": lambda module: module.norm.eval(),
    "number": lambda module: setattr(module, "factor", 2),
    "kind of a number": lambda module: setattr(module, "factor", 1.0),
    "truth for a number": lambda module: setattr(module, "factor", True),
    "sign of zero": lambda module: setattr(module, "shift", -0.0),
    "kind within a tuple": lambda module: setattr(module, "kernel", (1, True)),
    "list": lambda module: module.sizes.append(3),
    "set": lambda module: module.names.add("z"),
    "mapping": lambda module: module.options.update(p=2),
    "mapping that was empty": lambda module: module.kept.update(x=1),
    "kind of an empty mapping": lambda module: setattr(module, "kept", OrderedDict()),
    "further attribute": lambda module: setattr(module, "more", 1),
    "attribute's name": named_again,
    "attribute taken away": lambda module: delattr(module, "factor"),
    "function": lambda module: setattr(module, "act", lambda x: x - module.factor),
    "module": lambda module: setattr(module, "first", nn.Linear(4, 4, bias=False)),
    "module taken away": lambda module: setattr(module, "first", None),
    "order of modules": in_another_order,
    "class": lambda module: setattr(module, "__class__", Twice),
    "class of a part": lambda module: setattr(module.chain[0], "__class__", nn.GELU),
    "forward": lambda module: setattr(module, "forward", lambda x: x),
    "forward of a part": lambda module: setattr(module.first, "forward", lambda x: x),
    "hook": lambda module: module.first.register_forward_hook(lambda *_: None),
    "hook of a gradient": lambda module: module.wide.register_hook(lambda gradient: gradient * 2),
    "hook of a parameter": lambda module: module.wide.register_post_accumulate_grad_hook(lambda _: None),
    "attribute of a parameter": lambda module: setattr(module.wide, "sharded", True),
    "frozen": lambda module: module.wide.requires_grad_(False),
    "shape": grown,
    "stride": lambda module: setattr(module.wide, "data", module.wide.data.t().contiguous().t()),
    "precision": lambda module: module.half(),
    "device": lambda module: module.first.to("meta"),
    "tie": tied,
    "tensors swapped": swapped,
    "buffer": lambda module: setattr(module, "mask", torch.ones(4)),
    "buffer's values": lambda module: filled(module.mask),
    "small parameter's values": lambda module: filled(module.norm.bias.data),
    "values": lambda module: filled(module.offset),
    "values in a list": lambda module: filled(module.parts[0]),
    "tensor for None": lambda module: setattr(module.norm, "bias", None),
    "no memory": lambda module: module.mask.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_two_questions_about_a_module_is_noticed(change):
    module = Scale()
    first = key(module)
    assert first is not None and key(module) == first
    CHANGES[change](module)
    changed = key(module)
    trace_cache.clear()
    assert changed == key(module) != first


def test_parts_that_share_a_mapping_are_another_module_than_parts_with_equal_ones():
    shared, *equal = ({"calls": 0} for _ in range(3))
    parts = [nn.Identity() for _ in range(4)]
    for part, counted in zip(parts, (shared, shared, *equal), strict=True):
        part.counted = counted
    assert key(nn.Sequential(*parts[:2])) != key(nn.Sequential(*parts[2:]))


def test_code_that_changes_between_two_questions_about_a_module_is_noticed(monkeypatch):
    module = Scale()
    keys = [key(module)]
    monkeypatch.setitem(globals(), "WIDTH", 16)
    keys.append(key(module))
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, x: x)
    keys.append(key(module))
    monkeypatch.setattr(Scale, "forward", lambda self, x: self.first(x))
    keys.append(key(module))
    trace_cache.clear()
    assert key(module) == keys[-1]
    require_different(keys)


def test_what_is_given_beside_the_same_module_counts():
    module, inputs, other = Scale(), torch.zeros(2, 4), nn.Parameter(torch.zeros(3, 100))
    weight = module.wide

    def loss(output, target):
        return output.sum() + weight.sum()

    keys = [key(module, inputs), key(module, inputs, loss=loss), key(module, (2, 4), loss=loss)]
    filled(inputs)
    keys.append(key(module, inputs))
    weight = other  # as large, but not the module's
    keys.append(key(module, inputs, loss=loss))
    assert keys[-1] == key(module, inputs, loss=loss)
    require_different(keys)


def test_a_module_that_was_asked_about_is_not_kept():
    module = Scale()
    module.options["itself"] = module  # a circle
    references = [weakref.ref(part) for part in (module, module.first, module.wide)]
    first = key(module)
    del module
    gc.collect()
    assert first and [reference() for reference in references] == [None] * 3
    keys = [key(nn.Linear(4, width)) for width in range(1, 30)]
    require_different(keys)


def attention():
    return nn.Sequential(nn.TransformerEncoderLayer(64, 4, batch_first=True), nn.Flatten(), nn.Linear(64 * 32, 10))


def test_gpus_of_a_table_share_a_trace_where_none_can_differ_and_have_the_figures_of_single_answers(traced):
    job = {"inputs": (4, 32, 64), "precision": "fp16"}
    rows = devices_that_fit(attention, devices=("A100-SXM4-40GB", "H100-SXM5-80GB", "V100-SXM2-32GB", "MI100"), **job)
    assert len(traced) == 3  # an A100 and an H100 attend alike, a V100 has no flash attention, an MI100 no fused one
    for row in rows:
        assert figures(row.estimate) == figures(estimate(attention, device=row.device, **job))


def test_tensors_without_memory_are_not_read():
    """Reading them would end this process."""
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    whole = estimate(small, torch.randn(2, 8)).peak_memory_mib
    for parameter in small.parameters():
        parameter.untyped_storage().resize_(0)
    assert whole == estimate(small, torch.randn(2, 8)).peak_memory_mib


def test_names_that_are_not_utf8_and_integers_of_any_size_are_kept(cache):
    sizes = [2**64 - 1, -(2**70) - 1, 10**400]
    keep({"entry": {"file": "a\udc80.py", "sizes": sizes, "rows": [(1, None, True, 0.1)]}})
    assert recall("entry", "none") == [{"file": "a\udc80.py", "sizes": sizes, "rows": [[1, None, True, 0.1]]}, None]


def test_an_environment_without_msgpack_has_no_cache(cache):
    keeping = "from conf.files.disk_cache import keep, recall; keep({'entry': 1}); print(*recall('entry'))"
    command = [sys.executable, "-c", f"import sys; sys.modules['msgpack'] = None; {keeping}"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == "None\n" and not cache.exists()


def test_an_entry_that_would_fill_the_memory_is_none(cache, monkeypatch):
    monkeypatch.setattr(disk_cache, "MOST_BYTES", 1000)
    keep({"entry": "a" * 1000})
    assert recall("entry") == [None]


@pytest.mark.parametrize(
    "content",
    [
        b'{"trace": [1]}',  # JSON, in which earlier versions wrote
        msgpack.packb({"trace": [1], "kernels": {}}),
        msgpack.packb({"trace": [1]})[:-1],
        b"\xdd\xff\xff\xff\xff",  # the start of a list of 2**32 - 1 values
        b"\x91" * 1000 + b"\xc0",  # nested lists
        b"\x91" * 10**5,
        b"\xd4\x00x",  # an integer of no digits
        b"\xd6\xff\xff\xff\xff\xff",  # a time
        b"\xc4\x01a",  # bytes
    ],
)
def test_entries_of_others_are_traced_anew(cache, traced, content):
    first = estimate(CONFIG)
    with contextlib.closing(sqlite3.connect(cache / "traces.sqlite")) as database:
        keys = [name for (name,) in database.execute("SELECT key FROM entries")]
    DiskCache(cache / "traces.sqlite").write(dict.fromkeys(keys, content).items())
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


def test_answers_of_a_table_and_of_single_questions_stay_beside_each_other(cache, traced):
    table = devices_that_fit(CONFIG, devices=[A100, V100])
    as_another_process()
    later = estimate(CONFIG, device="T4")
    as_another_process()
    with contextlib.closing(sqlite3.connect(cache / "traces.sqlite")) as database, database:
        database.execute("DELETE FROM entries WHERE key NOT LIKE '% answer %'")  # so that none is made of the trace
    assert figures(estimate(CONFIG, device="T4")) == figures(later)
    assert [estimate(CONFIG, device=one).device for one in (A100, V100)] == [A100.name, V100.name]
    as_another_process()
    assert devices_that_fit(CONFIG, devices=[A100, V100]) == table
    assert len(traced) == 1
