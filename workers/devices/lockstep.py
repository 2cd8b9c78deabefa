"""One rank's part in a trial of several: the process group, and steps that all ranks run together.

Start reading at `Lockstep`. The first rank decides when the warm-up and the window end, as a trial alone does, and says
before each step that there is one; the others follow. Words travel over gloo also on GPUs, so that no kernel of theirs
runs beside those that are measured.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from workers.devices.base import Place
from workers.devices.window import RunStep

_STEP, _WINDOW, _END = range(3)
_LOOPBACK = ("lo", "lo0")  # by the names of Linux and macOS


class Lockstep:
    """Joins the trial's process group, which needs all of its ranks.

    Args:
        place: Of this rank.
        device: On which it trains: nccl joins the ranks on GPUs, gloo those on the CPU.
    """

    def __init__(self, place: Place, device: torch.device) -> None:
        names = {name for _, name in socket.if_nameindex()}
        for loopback in filter(names.__contains__, _LOOPBACK):  # the ranks are of one node
            os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
        on_gpu = device.type == "cuda"
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            init_method=f"file://{place.store}",
            rank=place.rank,
            world_size=place.ranks,
            device_id=device if on_gpu else None,
        )
        self.leads = place.rank == 0
        self._group = dist.new_group(backend="gloo") if on_gpu else dist.group.WORLD

    def leading(self, run_step: RunStep) -> RunStep:
        """Return `run_step` of the first rank, which has the others run a step beside it."""

        def run() -> tuple[int, float]:
            self._say(_STEP)
            return run_step()

        return run

    def begin_window(self) -> None:
        """Tell the other ranks that the next step is the window's first."""
        self._say(_WINDOW)

    def end(self) -> None:
        """Tell the other ranks that there are no more steps."""
        self._say(_END)

    def followed(self, run_step: RunStep, window_begins: Callable[[], object]) -> Iterator[tuple[int, float]]:
        """Run the steps that the first rank says; yield those of the window."""
        in_window = False
        while (word := self._heard()) != _END:
            if word == _WINDOW:
                in_window = True
                window_begins()
                continue
            step = run_step()
            if in_window:
                yield step

    def _say(self, word: int) -> None:
        dist.broadcast(torch.tensor(word), 0, group=self._group)

    def _heard(self) -> int:
        word = torch.tensor(_END)
        dist.broadcast(word, 0, group=self._group)
        return int(word)
