"""When stage 3 of DeepSpeed's ZeRO gathers and frees parameters: by the order of modules that the first step showed.

Start reading at `Fetching.entered` (DeepSpeed 0.19, deepspeed/runtime/zero/partitioned_param_coordinator.py).
"""

from __future__ import annotations

import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from itertools import accumulate

import torch
from torch import nn

from featurize.parallel.layout import Parallel
from featurize.parallel.streams import OneStream, Streams
from featurize.parallel.zero_shards import AWAY, HERE, Gathering, Shared, SharedParameters

_LONG_AGO = -1


class Fetching:
    """Follows the modules of a pass forward and back. The first pass is recorded; later ones are fetched ahead.

    Args:
        shared: The parameters.
        of_module: Parameters of a module itself, and those that it takes from others.
        streams: Of the rank's GPU.
        parallel: Stage 3's settings.
        stream: On which parameters are gathered.
    """

    def __init__(
        self, shared: SharedParameters, of_module: Callable[[nn.Module], Iterable[Shared]], streams: Streams,
        parallel: Parallel, stream: OneStream,
    ) -> None:  # fmt: skip
        self._shared, self._of_module, self._streams = shared, of_module, streams
        self._parallel, self._stream = parallel, stream
        self._order: list[nn.Module] = []  # of the recorded pass
        self._records = self._complete = False
        self._before: list[int] = [0]  # place in the order -> elements of all modules before it
        self._uses: dict[Shared, list[int]] = {}  # -> places of the modules that use it
        self._to_come: deque[tuple[Shared, int]] = deque()
        self._fetched_for: dict[Shared, int] = {}  # -> place of the last module that it was fetched for
        self._at = 0  # place of the next module
        self._gathered = 0  # elements
        self._coming: dict[Shared, Gathering] = {}
        self._backward: dict[nn.Module, set[Shared]] = {}  # modules whose backward pass runs -> what it computes again

    def begin_pass(self) -> None:
        """Hear that a forward pass of the whole model begins."""
        self._wait_for_rest()
        if not self._complete and self._records:
            self._complete = True
            self._prepare()
        self._records = True
        self._to_come = deque((one, at) for at, m in enumerate(self._order) for one in self._sorted(m))
        self._fetched_for = {}
        self._at = self._gathered = 0

    def entered(self, module: nn.Module, *, forward: bool) -> None:
        """Fetch what a module needs, and begin to fetch what comes after it."""
        self._compare(module)
        if self._records and not self._complete:
            self._order.append(module)
        if not forward:
            self._backward.setdefault(module, set())
        wanted = self._sorted(module)
        self._gather([one for one in wanted if one.state == AWAY])
        again = forward and torch._C._current_graph_task_id() != -1 and self._backward
        for one in wanted:
            one.users.add(id(module))
            if again and not one.parameter.requires_grad:
                last = next(reversed(self._backward))
                self._backward[last].add(one)
                one.users.add(id(last))
            if (gathering := self._coming.pop(one, None)) is not None:
                with self._streams.stream(self._stream):
                    self._shared.finish(gathering)
        self._streams.current_stream().wait_stream(self._stream)
        if self._complete:
            self._fetch_ahead(wanted)
        self._at += 1

    def left(self, module: nn.Module, *, forward: bool) -> None:
        """Free what a module needed, but for what is used again soon."""
        wanted = set(self._sorted(module))
        freed = {one for one in wanted if not self._complete or self._can_go(one)}
        if not forward:
            again = self._backward.pop(module, set())
            wanted |= again
            freed |= {one for one in again if not one.stays}
        for one in sorted(wanted, key=lambda one: one.number):
            one.users.discard(id(module))
            if one in freed:
                self._release(one)

    def end_backward(self) -> None:
        """Free what modules hold whose inputs need no gradient."""
        for module, again in reversed(self._backward.items()):
            for one in {*self._sorted(module), *again}:
                one.users.discard(id(module))
                if not one.stays:
                    self._release(one)
        self._backward.clear()

    def free_all(self) -> None:
        """Free all parameters, before an update."""
        self._wait_for_rest()
        for one in self._shared.all:
            one.users.clear()
            self._release(one)

    def _compare(self, module: nn.Module) -> None:
        """Forget the order where a pass takes another one."""
        if self._complete and (self._at >= len(self._order) or module is not self._order[self._at]):
            self._records = self._complete = False
            self._order, self._to_come, self._fetched_for = [], deque(), {}
            self._wait_for_rest()

    def _prepare(self) -> None:
        of_modules = [self._sorted(module) for module in self._order]
        self._before = [0, *accumulate(sum(one.numel for one in several) for several in of_modules)]
        uses: dict[Shared, list[int]] = defaultdict(list)
        for at, several in enumerate(of_modules):
            for one in several:
                uses[one].append(at)
        self._uses = dict(uses)

    def _can_go(self, one: Shared) -> bool:
        """Whether a parameter may be freed: it is not used again within so many elements, nor was it passed over when
        parameters were fetched ahead."""
        if one.stays or self._fetched_for.get(one, _LONG_AGO) > self._at:
            return False
        uses = self._uses.get(one, [])
        following = bisect.bisect_left(uses, self._at)
        if following == len(uses):
            return True
        return self._before[uses[following]] - self._before[self._at] >= self._parallel.stage3_max_reuse_distance

    def _fetch_ahead(self, wanted: list[Shared]) -> None:
        missing = {one for one in wanted if self._fetched_for.get(one, _LONG_AGO) < self._at}
        seen: set[Shared] = set()
        while self._to_come and len(seen) < len(missing):
            one, place = self._to_come.popleft()
            self._fetched_for[one] = place
            seen.add(one)
        room = self._parallel.stage3_max_live_parameters - self._gathered
        most = min(room, self._parallel.stage3_prefetch_bucket_size)
        ahead: list[Shared] = []
        elements = 0
        while self._to_come and elements < most:
            one, place = self._to_come.popleft()
            self._fetched_for[one] = max(self._fetched_for.get(one, _LONG_AGO), place)
            if one.state == AWAY and one not in ahead:
                ahead.append(one)
                elements += one.numel
        self._gather(ahead)

    def _gather(self, several: list[Shared]) -> None:
        if not several:
            return
        self._gathered += sum(one.numel for one in several)
        with self._streams.stream(self._stream):
            gathering = self._shared.gather(several)
        for one in several:
            self._coming[one] = gathering

    def _release(self, one: Shared) -> None:
        if one.state == HERE and not one.users:
            self._shared.free(one)
            self._gathered -= one.numel

    def _wait_for_rest(self) -> None:
        coming, self._coming = self._coming, {}
        while coming:
            one, gathering = coming.popitem()
            self._shared.finish(gathering)
            del gathering
            self._release(one)

    def _sorted(self, module: nn.Module) -> list[Shared]:
        return sorted(set(self._of_module(module)), key=lambda one: one.number)
