"""Memory and messages of a real rank's steps, as a trace has them: bytes that are alive, collectives in their order.

Start reading at `watched_steps`.
"""

import contextlib
import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from featurize.operators.replacing import replaced
from featurize.operators.tensor_parts import is_wrapper, local_tensor
from featurize.recording.values import mapped, tensors_of
from featurize.training.training_step import TrainingStep

SENT = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "_c10d_functional::all_reduce": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_to_all_single": "all_to_all",
}
MESSAGES = ("c10d::send", "c10d::recv_")


def watched_steps(model, batch, run=None, steps=2, made_by=None):
    """Run steps, and return the peak of all and what the last one sent.

    Args:
        model: Whose parameters and buffers are there before.
        batch: Tensors that are there, too.
        run: One step.
        steps: How many.
        made_by: Makes `run` of the watch, which sees what that takes.
    """
    watch = Watch()
    for tensor in (*model.parameters(), *model.buffers(), *batch):
        watch.hold(tensor)
    with watch, replaced(torch.UntypedStorage, "resize_", watch.resize(torch.UntypedStorage.resize_)):
        run = run or made_by(watch)
        for _ in range(steps):
            watch.sent.clear()
            run()
    return {"peak": watch.peak, "sent": watch.sent}


def loss_of(output, _target):
    return output.square().sum()


def watched_training(model, batch, settings, wrap=None):
    """Train a model on the CPU by `loss_of`, wrapped as ranks wrap it, and return what `watched_steps` does."""
    step, target = TrainingStep(model, settings, "cpu", loss=loss_of, wrap=wrap), torch.zeros(())
    return watched_steps(step.model, (batch, target), lambda: step((batch,), target))


def reduced_buckets(replica, watch):
    """Note each bucket of a DistributedDataParallel that is reduced; its numbers stay as they are. The reducer wants an
    answer of the group that no watch gives."""

    def reduced(_state, bucket):
        watch.note("c10d::allreduce_", [bucket.buffer()])
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    replica.register_comm_hook(None, reduced)
    return replica


class Watch(TorchDispatchMode):
    """Counts the bytes of storages that are alive, and notes what is sent."""

    def __init__(self):
        super().__init__()
        self.live, self.bytes, self.peak, self.sent = {}, 0, 0, []
        self.under_way = {}  # storage of what is received -> what is sent, which NCCL keeps until it was waited for

    def hold(self, tensor):
        tensor = local_tensor(tensor)
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

    def send(self, func, args):
        """Run a functional collective between copies, since gloo's threads keep both sides for some moments more."""
        with _disable_current_modes():
            out = torch.ops._c10d_functional.wait_tensor(func(args[0].clone(), *args[1:])).clone()
        self.hold(out)
        self.under_way[out.untyped_storage()._cdata] = args[0]
        splits = args[2] if "all_to_all" in func.name() else ()
        self.note(func._schema.name, [args[0], out], to_one=len(splits) > 1 == sum(size > 0 for size in splits))
        return out

    def note(self, name, sides, to_one=False):
        kind = "send" if to_one else SENT[name]
        self.sent.append([kind, max(sum(t.nbytes for t in tensors_of(side)) for side in sides)])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_wrapper, types)):
            return NotImplemented
        name = func._schema.name
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # below DTensor they come whole
                return func.decompose(*args, **(kwargs or {}))
        if name in MESSAGES:  # which live until they are waited for, as on a GPU
            if name == "c10d::send":
                self.sent.append(["send", args[0][0].nbytes])
            with _disable_current_modes():
                return func(*args, **(kwargs or {}))
        if name.startswith("c10d::"):
            self.note(name, args[:2])
            with _disable_current_modes():  # what gloo takes is gloo's own
                return sent_as_copies(func, args, kwargs or {})
        if name in SENT and not name.endswith("_"):
            return self.send(func, args)
        if name == "_c10d_functional::wait_tensor":
            self.under_way.pop(args[0].untyped_storage()._cdata, None)
        # On a GPU, copies in and out of buffers are one kernel.
        with _disable_current_modes() if name.startswith("fsdp::") else contextlib.nullcontext():
            out = func(*args, **(kwargs or {}))
        if name in SENT:
            self.note(name, [args[0], out])
        for one in out if isinstance(out, list | tuple) else [out]:
            if type(one) is torch.Tensor:  # no wrapper, and none of those that DTensor asks for shapes
                self.hold(one)
        return out


def sent_as_copies(func, args, kwargs):
    """Gloo's threads keep what they sent for some moments more, which would move the peak."""
    copies = mapped(args, torch.Tensor.clone)
    out = func(*copies, **kwargs)
    torch.distributed.Work.unbox(out[-1] if isinstance(out, tuple) else out).wait()
    for original, copy in zip(tensors_of(args), tensors_of(copies), strict=True):
        original.copy_(copy)
    from torch._C._distributed_c10d import FakeWork  # which releases before 2.8 do not have

    # Gloo copies what was scattered while it is waited for, on the device; NCCL does not.
    done = FakeWork().boxed()
    return (*out[:-1], done) if isinstance(out, tuple) else done
