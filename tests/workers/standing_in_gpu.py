"""The CPU in place of a GPU, for the probes' child processes: its requests go through the simulated allocator.

Start reading at `standing_in`. It shows that the probes run and what they read, not what a GPU would give.
"""

import contextlib
import types
import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from featurize.memory.allocator import AllocatorSettings, CachingAllocator
from workers.probes import contexts, histories, questions, workspaces

NAME, TOTAL_BYTES = "NVIDIA H100 80GB HBM3", 80 * 2**30


class StorageHistory(TorchDispatchMode):
    """Entries as PyTorch's allocator records them, one request for each storage that an operator makes."""

    def __init__(self, settings):
        super().__init__()
        self.allocator = CachingAllocator(None, settings, total_bytes=TOTAL_BYTES)
        self.entries, self.label, self._known, self._placed = [], "", set(), 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {self._key(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "cpu" and self._key(tensor) not in given:
                self._see(tensor.untyped_storage())
        return out

    @staticmethod
    def _key(tensor):
        return tensor.untyped_storage()._cdata

    def _see(self, storage):
        if storage._cdata in self._known or not storage.nbytes():
            return
        handle = self.allocator.allocate(storage.nbytes())
        self._segments()
        address = self.allocator.address_of(handle)
        self.entries.append(
            {"action": "alloc", "size": storage.nbytes(), "addr": address, "stream": 0, "user_metadata": self.label}
        )
        self._known.add(storage._cdata)
        weakref.finalize(storage, self._end, storage._cdata, handle, address, storage.nbytes())

    def _end(self, key, handle, address, size):
        self._known.discard(key)
        self.allocator.free(handle)
        for action in ("free_requested", "free_completed"):
            self.entries.append({"action": action, "size": size, "addr": address, "stream": 0})

    def _segments(self):
        for event in self.allocator.segment_events[self._placed :]:
            self.entries.append({"action": event.action, "size": event.size, "addr": event.address, "stream": 0})
        self._placed = len(self.allocator.segment_events)

    def snapshot(self):
        self.entries.append({"action": "snapshot", "size": 0, "addr": 0, "stream": 0})
        return {"device_traces": [list(self.entries)], "segments": []}


@contextlib.contextmanager
def standing_in(conf=""):
    """Make the probes' functions run on the CPU; gives the history of its requests."""
    history = StorageHistory(AllocatorSettings.parse(conf))
    allocator = history.allocator

    def label(text):  # autograd runs the backward pass on a thread of its own, which the caller's label does not reach
        history.label = "" if text == "backward" else text

    memory = {
        "_record_memory_history": lambda **options: history.__enter__(),
        "_snapshot": history.snapshot,
        "_set_memory_metadata": label,
    }
    functions = {
        "init": lambda: None,
        "synchronize": lambda *device: None,
        "empty_cache": allocator.empty_cache,
        "get_device_name": lambda *device: NAME,
        "get_device_properties": lambda *device: types.SimpleNamespace(total_memory=TOTAL_BYTES),
        "memory_reserved": lambda: allocator.reserved_bytes,
        "memory_allocated": lambda: allocator.allocated_bytes,
        "memory_stats": lambda: {
            "reserved_bytes.all.peak": allocator.peak_reserved_bytes,
            "allocated_bytes.all.peak": allocator.peak_allocated_bytes,
            "num_ooms": 0,
            "allocation.all.allocated": sum(entry["action"] == "alloc" for entry in history.entries),
        },
    }
    with contextlib.ExitStack() as stack:
        for probe in (contexts, histories, workspaces, questions):
            stack.enter_context(mock.patch.object(probe, "first_gpu", lambda: torch.device("cpu")))
        for name, function in memory.items():
            stack.enter_context(mock.patch.object(torch.cuda.memory, name, function, create=True))
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        stack.enter_context(mock.patch.object(torch._C, "_cuda_clearCublasWorkspaces", lambda: None, create=True))
        try:
            yield history
        finally:
            if history in torch.utils._python_dispatch._get_current_dispatch_mode_stack():
                history.__exit__(None, None, None)
