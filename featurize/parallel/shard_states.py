"""Which parameters of a stage's model are gathered: FSDP2's own state, which repeated passes bring about unrecorded.

Start reading at `ShardStates`. The states of parameter groups are private to PyTorch, tested on 2.13.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from featurize.parallel.streams import Streams
from featurize.recorder import Recorder


class ShardStates:
    """The state of a model's shards.

    Args:
        model: With modules that `fully_shard` wrapped, or none.
        recorder: Hears nothing of what `bring_to` does.
        streams: Likewise.
    """

    def __init__(self, model: nn.Module, recorder: Recorder, streams: Streams) -> None:
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._recorder, self._streams = recorder, streams

    def now(self) -> Hashable:
        """Return the state of each module's parameters."""
        return tuple(tuple(group._sharded_state for group in _groups(module)) for module in self._modules)

    def bring_to(self, state: Hashable) -> None:
        """Gather or free parameters, as they are in another state."""
        if state == self.now():
            return
        assert isinstance(state, tuple), "it was `now` before"
        recorder, paused = self._streams.recorder, self._recorder.paused
        self._streams.recorder, self._recorder.paused = None, True
        try:
            for module, wanted in zip(self._modules, state, strict=True):
                if ShardedState.UNSHARDED in wanted:
                    module.unshard()
                else:
                    module.reshard()
        finally:
            self._streams.recorder, self._recorder.paused = recorder, paused


def _groups(module: FSDPModule) -> list[Any]:
    return module._get_fsdp_state()._fsdp_param_groups
