"""The allocator's own history of a process: recorded from its first allocation, and read in few, plain values.

Start reading at `start`; `featurize.memory.allocator_history` replays what `recorded` gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_MOST_ENTRIES = 10_000_000


def start() -> None:
    """Record every request of the GPU's allocator from now on. Call it before the first allocation."""
    import torch

    torch.cuda.init()
    torch.cuda.memory._record_memory_history(max_entries=_MOST_ENTRIES, context=None)


def label(where: str) -> None:
    """Mark this thread's requests from now on with a text, where the release can (2.11 can, 2.8 cannot)."""
    import torch

    if hasattr(torch.cuda.memory, "_set_memory_metadata"):
        torch.cuda.memory._set_memory_metadata(where)


def entries() -> list[dict[str, Any]]:
    """Return the first GPU's history so far: `action`, `size`, `addr`, `stream`, and `where` as `label` said."""
    import torch

    return _plain(torch.cuda.memory._snapshot())


def _plain(snapshot: Mapping[str, Any]) -> list[dict[str, Any]]:
    plain = []
    for entry in snapshot["device_traces"][0]:
        one = {"action": entry["action"], "size": entry["size"], "stream": entry["stream"]}
        if "addr" in entry:  # an out-of-memory has none
            one["addr"] = entry["addr"]
        if entry["action"] == "alloc" and entry.get("user_metadata"):
            one["where"] = entry["user_metadata"]
        plain.append(one)
    return plain


def recorded() -> dict[str, Any]:
    """Return the history with what it must explain: segments, peaks and out-of-memory errors of the first GPU."""
    import torch

    torch.cuda.synchronize()
    snapshot, stats = torch.cuda.memory._snapshot(), torch.cuda.memory_stats()
    segments = [segment for segment in snapshot["segments"] if segment["device"] == 0]
    for segment in segments:
        for block in segment["blocks"]:
            block.pop("frames", None)
            block.pop("history", None)
        segment.pop("frames", None)
    return {
        "trace": _plain(snapshot),
        "segments": segments,
        "total_bytes": torch.cuda.get_device_properties(0).total_memory,
        "peak_reserved": stats["reserved_bytes.all.peak"],
        "peak_allocated": stats["allocated_bytes.all.peak"],
        "ooms": stats["num_ooms"],
    }
