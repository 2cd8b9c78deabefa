"""torch.compile in a script: modules as `featurize.recording.compiled` models them, functions as they are written.

Start reading at `ScriptCompiler.install`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch._inductor import list_mode_options

from featurize.job.training_settings import GRAPH_MODES
from featurize.operators.replacing import replace_attribute, stands_for
from featurize.recording.compiled import CompiledRegions
from featurize.recording.cuda_graphs import AUTOTUNED, CudaGraphs
from learn.script.device_mode import PretendCuda
from learn.script.script_recorder import ScriptRecorder

FUNCTION = "torch.compile of a function was left out: it runs as it is written"

BUCKETS = "_gpufarm_buckets"  # attribute of a DistributedDataParallel: bytes of its buckets
_OWN = ("forward", "_orig_mod")  # attributes that make a module compiled


def _parts_of_wrapper(module: nn.Module) -> list[nn.Module] | None:
    """Return what is compiled of a model that PyTorch's wrappers divide, whose own code is left to Python: what a
    replica wraps, or the innermost units of shards. None for a model without a wrapper inside."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return [module.module]
    if (sharding := sys.modules.get("torch.distributed.fsdp")) is None:
        return None
    wrappers = sharding.FSDPModule, sharding.FullyShardedDataParallel
    units = [one for one in module.modules() if isinstance(one, wrappers)]
    if all(one is module for one in units):
        return None
    return [one for one in units if sum(isinstance(part, wrappers) for part in one.modules()) == 1]


class ScriptCompiler:
    """The modules that a script has compiled.

    note   hears which function was not compiled
    """

    def __init__(self, recorder: ScriptRecorder, note: Callable[[str], None]) -> None:
        self._recorder, self._note = recorder, note
        self._regions: list[CompiledRegions] = []
        self._compiled: set[int] = set()  # modules, which live as long as the process

    def install(self) -> None:
        """Replace torch.compile and `nn.Module.compile` in this process."""

        @stands_for("compile", torch)
        def compile_any(_compile: Any, model: Any = None, **kwargs: Any) -> Any:
            if model is None:
                return lambda given: torch.compile(given, **kwargs)
            return self._module(model, kwargs) if isinstance(model, nn.Module) else self._function(model)

        def state_of(module: nn.Module) -> dict[str, Any]:
            """Return what is copied and saved of a module: a copy of a compiled one runs as it is written."""
            own = _OWN if id(module) in self._compiled else ()
            return {name: value for name, value in vars(module).items() if name not in own and not saves(value)}

        def saves(value: Any) -> bool:
            """Return whether an attribute is the method that `containment` gives a module which is not scripted."""
            return isinstance(value, functools.partial) and value.func is torch.jit.save

        setattr(nn.Module, "__getstate__", state_of)  # noqa: B010 -- before Python 3.11 there is none to replace
        replace_attribute(nn.Module, "compile", lambda module, *args, **kwargs: self._module(module, kwargs) and None)

    @property
    def capturing(self) -> bool:
        """Return whether a graph is captured now, in a thread of its own, which is to have no modes."""
        return any(regions.capturing for regions in self._regions)

    @property
    def compiles(self) -> bool:
        """Tell whether the script has compiled a module."""
        return bool(self._compiled)

    def notes(self) -> tuple[str, ...]:
        """Return how sure the figures of the compiled modules are."""
        return tuple(dict.fromkeys(text for regions in self._regions for text in regions.notes()))

    def _module(self, module: nn.Module, given: Mapping[str, Any]) -> nn.Module:
        if id(module) in self._compiled:
            return module
        if (parts := _parts_of_wrapper(module)) is not None:
            vars(module)["_orig_mod"] = module
            for part in parts:
                self._module(part, given)
            return module
        # The first capture imports it anyway, but torch 2.6 cannot do so below `DisableTorchFunction`, as in
        # `compiled_as_it_is`.
        import torch._functorch.aot_autograd

        self._compiled.add(id(module))
        forward = module.forward

        @functools.wraps(forward)
        def as_on_a_gpu(*args: Any, **kwargs: Any) -> Any:
            if self.capturing:  # decompositions would pass on the device that they read
                return forward(*args, **kwargs)
            with torch._C._EnableTorchFunction(), PretendCuda():
                return forward(*args, **kwargs)

        vars(module)["forward"] = as_on_a_gpu
        regions = CompiledRegions(module, [""], graphs=self._graphs(given))
        regions.recorder = self._recorder
        self._regions.append(regions)
        compiled = module.forward

        @functools.wraps(forward)
        def compiled_as_it_is(*args: Any, **kwargs: Any) -> Any:
            replica = nn.parallel.DistributedDataParallel._get_active_ddp_module()
            regions.buckets = getattr(replica, BUCKETS, None)
            with torch._C.DisableTorchFunction():  # the graphs are of meta tensors
                on_the_gpu = any(tensor.is_meta for tensor in module.parameters())
                return (compiled if on_the_gpu else as_on_a_gpu)(*args, **kwargs)

        vars(module)["forward"] = compiled_as_it_is
        vars(module)["_orig_mod"] = module  # no part of itself: `parameters` and `state_dict` are as they were
        return module

    def _graphs(self, given: Mapping[str, Any]) -> CudaGraphs | None:
        """Return what the graphs of a module run as, by the arguments of torch.compile; one for the whole script.

        Raises:
            RuntimeError: Inductor does not know the mode, as torch.compile raises it.
        """
        mode = given.get("mode")
        if given.get("backend", "inductor") == "inductor":
            list_mode_options(mode)
        if isinstance(mode, str) and mode.startswith("max-autotune"):
            self._note(AUTOTUNED)
        if mode not in GRAPH_MODES and not (given.get("options") or {}).get("triton.cudagraphs"):
            return None
        self._recorder.memory.graphs = self._recorder.memory.graphs or CudaGraphs()
        return self._recorder.memory.graphs

    def _function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            self._note(FUNCTION)
            return function(*args, **kwargs)

        return noting
