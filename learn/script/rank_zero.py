"""Rank 0 of the job that a script is a process of: its streams, its wrappers, and what it sends.

Start reading at `RankZero.begin`.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from featurize.operators.torch_releases import complete_collectives
from featurize.recording.step_trace import Collective
from featurize.recording.values import remember
from featurize.training.data_parallel import Replica
from featurize.training.releases import refused_modes
from learn.script.command_line import ScriptCommand
from learn.script.device_mode import CUDA
from learn.script.script_recorder import ScriptRecorder

if TYPE_CHECKING:
    from featurize.training.ranks import Ranks
    from featurize.training.streams import Streams
    from featurize.training.zero import ZeroRank


class RankZero:
    """The one process that runs, among those that a launcher starts.

    Args:
        recorder: Of the script.
        command: How its processes are started.

    `launched` is how many there are. A script that starts them by itself changes it.
    """

    def __init__(self, recorder: ScriptRecorder, command: ScriptCommand) -> None:
        self.recorder, self._command, self.launched = recorder, command, command.nodes * command.per_node
        self._wrappers: list[Replica | ZeroRank] = []
        self._zero: ZeroRank | None = None
        self._wrapper: Parallel | None = None  # of the first replica
        self._streams: Streams | None = None
        self._ranks: Ranks | None = None
        self._collectives: tuple[Collective, ...] = ()
        self._entered = contextlib.ExitStack()  # until the process ends

    def begin(self) -> None:
        """The script's process group is there, with several ranks: from now on what they send is heard, and PyTorch's
        own wrappers run on meta tensors where the release allows that."""
        if self._streams is not None:
            return
        from featurize.training.ranks import Ranks  # their imports are heavy
        from featurize.training.streams import Streams

        complete_collectives()
        streams = self._streams = Streams()
        streams.recorder = self.recorder
        self._ranks = Ranks(streams, {})
        self.recorder.among_ranks = self._ranks.ran
        if "fsdp" not in refused_modes():
            from featurize.training.shards_on_meta import shards_on_meta

            self._entered.enter_context(shards_on_meta(streams, CUDA))

    def settings(self, **given: Any) -> Parallel:
        """Return the layout of a replica with these settings of DistributedDataParallel, or of ZeRO."""
        return replace(self._command.layout(self.launched), own=1, ddp=self.launched, **given)

    def add(self, replica: Replica, settings: Parallel | None) -> None:
        """Add a wrapped model; replicas on some of the ranks come with None."""
        self._wrappers.append(replica)
        self._wrapper = self._wrapper or settings

    def play(self, layout: Parallel, settings: Training, parameters: int) -> ZeroRank:
        """Return what plays a rank of ZeRO from now on, with the script's recorder, for a model of so many elements."""
        from featurize.training.play_rank import played_rank
        from featurize.training.zero import ZeroRank

        self._wrapper, played = layout, self._entered.enter_context(played_rank(layout, settings))
        assert isinstance(played, ZeroRank), "a layout of ZeRO"
        played.attach(self.recorder)
        played.parameters = parameters
        self._zero = played
        self._wrappers.append(played)
        return played

    def begin_backward(self) -> None:
        """Begin a backward pass."""
        if self._zero is not None:
            self._zero.begin_phase("forward")
            self._zero.begin_phase("backward")

    def end_backward(self) -> None:
        """End a backward pass."""
        if self._zero is not None:
            self._zero.begin_phase("optimizer")

    def parameters(self) -> int:
        """Return the elements of the model's parameters, also of those that the rank holds a part of."""
        return self.recorder.parameters() if self._zero is None else self._zero.parameters

    def axis_of(self, group: Any) -> str:
        """Return the name of a process group, as collectives have it."""
        from featurize.training.ranks import own_axis

        return "" if group is None or self._streams is None else own_axis(group.group_name)

    def begin_step(self) -> None:
        """Begin a step."""
        for wrapper in self._wrappers:
            wrapper.begin_step()
        if self._ranks is not None:
            self._ranks.begin_step()

    def end_step(self) -> None:
        """End a step; the last one's collectives count."""
        sent = () if self._streams is None else self._streams.collectives()
        self._collectives = (*sent, *(one for wrapper in self._wrappers for one in wrapper.collectives()))

    def collectives(self) -> tuple[Collective, ...]:
        """Return what was sent in the last step; nothing of one process alone."""
        return self._collectives if self.layout() is not None else ()

    def layout(self) -> Parallel | None:
        """Return how the job is spread; None for one process, or for several that never meet."""
        if self.launched == 1 or self._streams is None:
            return None
        return self._wrapper or self._command.layout(self.launched)

    def remarks(self) -> list[str]:
        """Return what is taken for granted of the ranks."""
        if self.launched == 1:
            return []
        if self._streams is None:
            return [f"the script starts no process group: each of its {self.launched} processes trains by itself"]
        return [f"the script ran as rank 0 of {self.launched}; where other ranks run other code, they may need more"]

    def reduced(self, tensor: Tensor, op: Any, ranks: int) -> None:
        """Give a reduced tensor the value that it has where each rank had the same, as far as it is known."""
        values = self.recorder.values.of(tensor)
        if ranks == 1 or values is None or op not in (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT):
            return
        total = values * ranks if op == dist.ReduceOp.SUM else values**ranks
        if tensor.is_meta:
            self._learn(tensor, total)
        else:
            tensor.detach().copy_(total)

    def gathered(self, outputs: Tensor | list[Tensor], tensor: Tensor) -> None:
        """Give gathered tensors of a GPU the value that the one of this rank has, as far as it is known."""
        values = self.recorder.values.of(tensor) if tensor.is_meta else None
        if values is None:
            return
        if isinstance(outputs, Tensor):
            copies = outputs.numel() // max(values.numel(), 1)
            values, outputs = values.flatten().repeat(copies).reshape(outputs.shape), [outputs]
        for output in outputs:
            self._learn(output, values)

    def _learn(self, tensor: Tensor, values: Tensor) -> None:
        remember(tensor, values.clone())
        self.recorder.values.learn([tensor])
