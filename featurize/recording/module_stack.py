"""Where a step is: the module whose forward pass runs, or ran for what the backward pass computes, and where it failed.

Start reading at `ModuleStack`.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

_WRAPPED = "_fsdp_wrapped_module"  # attribute of FSDP1's wrapper: what it wraps
_next_node = torch.autograd._get_sequence_nr  # of the autograd node that will be made next
_current_node = torch._C._current_autograd_node


def origin(error: BaseException | None) -> tuple[str, str]:
    """The operator and the module that an error of a recorded step came from, empty where they are not known."""
    while error is not None:
        if "traced_at" in vars(error):
            return vars(error)["traced_at"]
        error = error.__cause__ or error.__context__
    return "", ""


class ModuleStack:
    """The paths of the modules whose forward pass runs, the outermost first (`running`)."""

    def __init__(self, model: nn.Module) -> None:
        self.running: list[str] = []
        self._paths: dict[int, str] = {}
        self._node_modules: dict[int, str] = {}  # autograd node -> the module whose forward pass made it
        self.add(model)

    def add(self, model: nn.Module) -> None:
        """Call modules by their paths within a model, without those of wrappers around it."""
        for name, module in model.named_modules():
            path = ".".join(part for part in name.split(".") if part != _WRAPPED)
            self._paths[id(module)] = path or type(module).__name__

    def knows(self, module: nn.Module) -> bool:
        """Return whether a module has a path."""
        return id(module) in self._paths

    def enter(self, module: nn.Module) -> None:
        """Note that a module's forward pass begins."""
        self.running.append(self._paths.get(id(module), type(module).__name__))

    def leave(self) -> None:
        """Note that the innermost forward pass ends, or fails."""
        if (error := sys.exception()) is not None:
            self.note_failure(error)
        if self.running:
            self.running.pop()

    def now(self) -> str:
        """Return the path of the module that computes; empty where none is known."""
        if self.running:
            return self.running[-1]
        node = _current_node()
        return self._node_modules.get(node._sequence_nr(), "") if node is not None else ""

    def ran(self) -> None:
        """Note that an operator ran in a forward pass: the autograd node that it may have made is the module's."""
        # The node's first operator: later ones without a node of their own may be another module's.
        self._node_modules.setdefault(_next_node() - 1, self.running[-1])

    def note_failure(self, error: BaseException, operator: str = "") -> None:
        """An error passes through. The first note of it is the innermost, and stays."""
        # With the error itself: kept here, one that the model catches would keep alive what its frames hold.
        if "traced_at" not in vars(error):
            vars(error)["traced_at"] = operator, self.now()
