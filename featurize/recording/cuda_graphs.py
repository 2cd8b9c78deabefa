"""CUDA graphs of a compiled model in a trace (`compile=reduce-overhead`): one launch each, and their memory pool.

Start reading at `CudaGraphs`. The host launches a graph, not its kernels; inputs that are no parameters, buffers or
results of another graph are copied into it first. What lies in the graphs' pool cannot be used by what runs eagerly,
and vice versa (`StepTrace.graph_pool_bytes`). Source: torch/_inductor/cudagraph_trees.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator

GRAPHED = (
    "the compiled model runs as CUDA graphs: the host launches each graph once, loss and optimizer stay eager; their "
    "memory pool is not shared with what runs eagerly, which the bound includes and the figure does not"
)
AUTOTUNED = "torch.compile: kernels of max-autotune are estimated as those of the default mode; no search is modelled"


class CudaGraphs:
    """The graphs of one trace. `Recorder` asks it of each operator and block while a graph runs."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()  # that lie in the pool
        self._input_bytes: dict[Hashable, int] = {}
        self._launched: bool | None = None  # the graph that runs; None: none does

    @contextlib.contextmanager
    def replay(self, graph: Hashable, input_bytes: int) -> Iterator[None]:
        """Run one graph within, by whatever tells it from another: its operators are launched together. `input_bytes`
        were copied into it."""
        self._input_bytes[graph] = input_bytes
        before, self._launched = self._launched, False
        try:
            yield
        finally:
            self._launched = before

    def took(self, block: int) -> None:
        """Note a block that is allocated: while a graph runs, it lies in the pool."""
        if self._launched is not None:
            self.blocks.add(block)

    def is_launched(self) -> bool:
        """Return whether the operator that is noted now is launched with one before it."""
        launched = self._launched
        if launched is not None:
            self._launched = True
        return bool(launched)

    @property
    def input_bytes(self) -> int | None:
        """Bytes of the inputs that are copied into the graphs; None where no graph ran."""
        return sum(self._input_bytes.values()) if self._input_bytes else None
