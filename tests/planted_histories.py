"""Allocator histories in the recorder's format, made by our own simulator with planted differences: for tests only.

No GPU has recorded one yet. Start reading at `planted_history`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from featurize.configs.trial import config_from_mapping
from featurize.device.device_spec import load_device
from featurize.memory.allocator import AllocatorSettings, CachingAllocator, PoolBlock, Segment
from featurize.operators.library_calls import CUBLAS, workspace_bytes
from featurize.trace.tracer import trace_config

DEVICE = "NVIDIA H100 80GB HBM3"
SPEC = load_device("H100-SXM5-80GB")
CNN = {
    "family": "cnn",
    "image_size": 32,
    "channels": 3,
    "classes": 10,
    "base_filters": 32,
    "depth": 3,
    "topology": "uniform",
    "kernel_size": 3,
    "activation": "relu",
    "batch_size": 16,
    "batch_norm": True,
}


def planted_history(
    mapping: Mapping[str, Any] = CNN,
    *,
    conf: str = "",
    recorded_conf: str | None = None,
    scale_workspace: float = 1.0,
    change: Callable[[list[tuple[str, int, int]]], None] = lambda requests: None,
) -> dict[str, Any]:
    """Return a history of two steps as the trace predicts it, but for what is planted.

    Args:
        mapping: The trial config.
        conf: Allocator settings of the process.
        recorded_conf: What the history says they were, where that differs.
        scale_workspace: Factor on what convolutions take.
        change: Changes the list of requests (`alloc` or `free`, number of the block, bytes) before they are placed.
    """
    spec = SPEC
    trace = trace_config(config_from_mapping(mapping), device=spec)
    settings = AllocatorSettings.parse(conf)
    requests: list[tuple[str, int, int]] = []
    step = 0
    for event in trace.events:
        if event.step != step:
            step = event.step
            requests.append(("mark", 0, 0))
        call = trace.blocks[event.block].call
        if event.nbytes > 0:
            requests.append(("alloc", event.block, event.nbytes))
        elif event.nbytes < 0:
            requests.append(("free", event.block, 0))
        elif call is not None and (taken := workspace_bytes(call, spec)):
            if call.kind != CUBLAS:
                taken = int(taken * scale_workspace)
            requests.append(("alloc", event.block, taken))
            if call.kind != CUBLAS:
                requests.append(("free", event.block, 0))
    requests.append(("mark", 0, 0))
    change(requests)
    return {
        "name": "planted",
        "config": dict(mapping),
        "conf": conf if recorded_conf is None else recorded_conf,
        "torch_version": "2.11.0",
        "device_name": DEVICE,
        "total_bytes": 80 * 2**30,
        **_placed(requests, settings),
    }


def _placed(requests: list[tuple[str, int, int]], settings: AllocatorSettings) -> dict[str, Any]:
    allocator = CachingAllocator(None, settings, total_bytes=80 * 2**30)
    entries: list[dict[str, Any]] = []
    handles: dict[int, tuple[int | None, int, int]] = {}
    marks = []
    placed = 0  # segment events that are in the entries
    for action, block, nbytes in requests:
        if action == "mark":
            marks.append(len(entries))
            continue
        if action == "alloc":
            handle = allocator.allocate(nbytes)
            for event in allocator.segment_events[placed:]:
                entries.append({"action": event.action, "size": event.size, "addr": event.address, "stream": 0})
            placed = len(allocator.segment_events)
            handles[block] = handle, allocator.address_of(handle), nbytes
            entries.append({"action": "alloc", "size": nbytes, "addr": handles[block][1], "stream": 0})
        else:
            handle, address, size = handles.pop(block)
            allocator.free(handle)
            for freed in ("free_requested", "free_completed"):
                entries.append({"action": freed, "size": size, "addr": address, "stream": 0})
    return {
        "trace": entries,
        "marks": marks,
        "segments": [],
        "peak_reserved": allocator.peak_reserved_bytes,
        "peak_allocated": allocator.peak_allocated_bytes,
        "ooms": 0,
    }


def recorded_segments(snapshot: Iterable[Mapping[str, Any]]) -> tuple[Segment, ...]:
    """`torch.cuda.memory_snapshot()` of one device in the simulator's terms, to compare with its `snapshot()`."""
    segments = []
    for segment in snapshot:
        blocks, address = [], int(segment["address"])
        for block in segment["blocks"]:
            live = block["state"] == "active_allocated"
            size, requested = int(block["size"]), int(block.get("requested_size", 0)) if live else 0
            blocks.append(PoolBlock(address, size, requested, str(block["state"])))
            address += size
        segments.append(
            Segment(
                address=int(segment["address"]),
                size=int(segment["total_size"]),
                pool=str(segment["segment_type"]),
                stream=int(segment["stream"]),
                expandable=bool(segment.get("is_expandable", False)),
                blocks=tuple(blocks),
            )
        )
    return tuple(sorted(segments, key=lambda segment: segment.address))
