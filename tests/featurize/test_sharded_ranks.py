"""One rank of `fully_shard` in a trace, against real ranks that talk over gloo: bytes and collectives are the same."""

import contextlib
import json
import weakref

import pytest
import torch
from torch import nn
from torch._C._distributed_c10d import FakeWork
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.checkpoint import checkpoint

from featurize.parallel.layout import Parallel
from featurize.parallel.sharding import shard
from featurize.replacing import replaced
from featurize.trace import trace_step
from featurize.training import Training, TrainingStep

WIDTH, HIDDEN, BATCH = 67, 132, 24  # ranks divide what a plan splits; what is sharded is uneven
SENT = {
    "c10d::_allgather_base_": "all_gather", "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce", "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
}  # fmt: skip
PLAN = {"first": "colwise_gather_output", "blocks.*.wide": "colwise", "blocks.*.narrow": "rowwise"}
# Of `Parallel`, and whether blocks are computed again.
CASES = {
    "two": ({"fsdp": 2}, False),
    "three": ({"fsdp": 3}, False),
    "kept": ({"fsdp": 2, "reshard_after_forward": False}, False),
    "halves": ({"fsdp": 3, "param_dtype": "bf16", "reduce_dtype": "fp32"}, False),
    "checkpointed": ({"fsdp": 2}, True),
    "hybrid": ({"ddp": 2, "fsdp": 2}, False),
    "hybrid halves": ({"ddp": 2, "fsdp": 2, "param_dtype": "bf16", "reduce_dtype": "fp32"}, True),
    "part": ({"fsdp": 4, "reshard_after_forward": 2}, False),
    "wrapped": ({"fsdp": 2, "wrap": ("Linear",)}, False),
    "split": ({"tp": 2, "tp_plan": PLAN}, False),
    "split in three": ({"tp": 3, "tp_plan": PLAN}, True),
    "split and sharded": ({"fsdp": 2, "tp": 2, "tp_plan": PLAN, "param_dtype": "bf16"}, True),
}


class Block(nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        self.wide, self.narrow = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return checkpoint(self.change, x, use_reentrant=False) if self.again else self.change(x)

    def change(self, x):
        return self.narrow(torch.relu(self.wide(x)))


class Net(nn.Module):
    def __init__(self, again=False):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(again) for _ in range(3))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.last = nn.Linear(WIDTH, 5)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.frozen(x))


def loss_of(output, _target):
    return output.square().sum()


def training():
    return Training(optimizer="momentum", implementation="foreach", clip_norm=1.0)


class Watch(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and notes what is sent."""

    def __init__(self):
        super().__init__()
        self.live, self.bytes, self.peak, self.sent = {}, 0, 0, []

    def hold(self, tensor):
        tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        storage = tensor.untyped_storage()
        if (key := storage._cdata) not in self.live:
            self.live[key] = storage.nbytes(), weakref.ref(storage, lambda _: self.change(key, 0, ends=True))
            self.bytes += storage.nbytes()
            self.peak = max(self.peak, self.bytes)

    def change(self, key, nbytes, ends=False):
        before, reference = self.live.pop(key)
        self.bytes += nbytes - before
        self.peak = max(self.peak, self.bytes)
        if not ends:
            self.live[key] = nbytes, reference

    def resize(self, original):
        def resize_(storage, nbytes):
            out = original(storage, nbytes)
            if storage._cdata in self.live:
                self.change(storage._cdata, nbytes)
            return out

        return resize_

    def note(self, name, sides):
        self.sent.append([SENT[name], max(sum(t.nbytes for t in as_list(side)) for side in sides)])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented
        name = func._schema.name
        if name.startswith("c10d::"):
            sides = [side for side in args[:2] if isinstance(side, list | torch.Tensor)]
            self.note(name, sides)
            with _disable_current_modes():  # what gloo takes is gloo's own
                return sent_as_copies(func, sides, args[len(sides) :])
        # On a GPU, copies in and out of buffers are one kernel.
        with _disable_current_modes() if name.startswith("fsdp::") else contextlib.nullcontext():
            out = func(*args, **(kwargs or {}))
        if name in SENT:
            self.note(name, [args[0], out])
        for one in out if isinstance(out, list | tuple) else [out]:
            if type(one) is torch.Tensor:  # no wrapper, and none of those that DTensor asks for shapes
                self.hold(one)
        return out


def as_list(side):
    return side if isinstance(side, list) else [side]


def sent_as_copies(func, sides, rest):
    """Gloo's threads keep what they sent for some moments more, which would move the peak."""
    copies = [[t.clone() for t in side] if isinstance(side, list) else side.clone() for side in sides]
    work = func(*copies, *rest)[-1]
    torch.distributed.Work.unbox(work).wait()
    for side, copied in zip(sides, copies, strict=True):
        for one, done in zip(as_list(side), as_list(copied), strict=True):
            one.copy_(done)
    return sides[0], FakeWork().boxed()


def train_real(rank, init, folder):
    """One of four real processes, which trains the cases in which it takes part."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=init, rank=rank, world_size=4)
    measured = {}
    for name, (options, again) in CASES.items():
        parallel = Parallel(**options)
        places = torch.arange(parallel.ranks).view(*parallel.axes.values())
        mesh = DeviceMesh("cpu", places, mesh_dim_names=tuple(parallel.axes))
        if rank < parallel.ranks:
            measured[name] = train(shard(Net(again), parallel, mesh))
    (folder / f"{rank}.json").write_text(json.dumps(measured))
    torch.distributed.destroy_process_group()


def train(model):
    step = TrainingStep(model, training(), "cpu", loss=loss_of)
    batch, target = torch.randn(BATCH, WIDTH), torch.zeros(())
    watch = Watch()
    for tensor in (*model.parameters(), *model.buffers(), batch, target):
        watch.hold(tensor)
    with watch, replaced(torch.UntypedStorage, "resize_", watch.resize(torch.UntypedStorage.resize_)):
        for _ in range(2):
            watch.sent.clear()
            step((batch,), target)
    return {"peak": watch.peak, "sent": watch.sent}


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    arguments = f"file://{folder / 'store'}", folder
    torch.multiprocessing.start_processes(train_real, args=arguments, nprocs=4, start_method="spawn")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]


def traced(options, again=False, rank=0):
    inputs, target = torch.empty(BATCH, WIDTH, device="meta"), torch.empty((), device="meta")
    return trace_step(
        lambda: Net(again), inputs, target, loss_of, settings=training(), training_loop=False, rank=rank,
        parallel=Parallel(**options),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["split", "split and sharded"])
@pytest.mark.parametrize("settings", [{"precision": "fp16"}, {"ema": True}], ids=["scaled", "averaged"])
def test_modules_that_are_not_split_train_beside_those_that_are(name, settings):
    options, _ = CASES[name]
    trace = trace_step(
        Net, torch.empty(BATCH, WIDTH, device="meta"), settings=Training(**settings), parallel=Parallel(**options)
    )
    assert {one.kind for one in trace.collectives} >= {"all_reduce"}


@pytest.mark.parametrize("name", CASES)
def test_bytes_and_collectives_are_those_of_real_ranks(measured, name):
    options, again = CASES[name]
    for rank in range(Parallel(**options).ranks):
        trace = traced(options, again, rank)
        real = measured[rank][name]
        assert [[one.kind, one.nbytes] for one in trace.collectives] == real["sent"]
        assert trace.peak_live_bytes == real["peak"]
