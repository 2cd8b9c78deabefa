"""Parameters in stage 3 of DeepSpeed's ZeRO: each rank has a part of each, and gathers the whole while modules need it.

Start reading at `SharedParameters.follow` (DeepSpeed 0.19, deepspeed/runtime/zero/partitioned_param_coordinator.py).
Gathering is that of deepspeed/runtime/zero/partition_parameters.py (`all_gather_coalesced`, `AllGatherCoalescedHandle`,
`_partition_param`).
"""

from __future__ import annotations

import bisect
import contextlib
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from featurize.job.layout import Parallel
from featurize.operators.replacing import replaced
from featurize.recording.step_trace import COMMUNICATION, GATHERED
from featurize.timing.collectives import ALL_GATHER
from featurize.training.streams import OneStream, Streams

AWAY, COMING, HERE = "away", "coming", "here"


@dataclass(eq=False)
class Shared:
    """One parameter.

    number    its place in the model
    count     elements of a rank's part, the same on all ranks
    stays     it is small, and is gathered once a step
    part      the rank's elements; None where they are in host memory
    users     modules that need it now
    """

    parameter: nn.Parameter
    number: int
    numel: int
    shape: torch.Size
    count: int
    stays: bool
    part: Tensor | None = None
    state: str = HERE
    users: set[int] = field(default_factory=set)


@dataclass(eq=False)
class Gathering:
    """Parameters on their way. Several of them come in one buffer, which lives until each of them was asked for."""

    sent: int
    several: Sequence[Shared]
    buffer: Tensor | None
    is_over: bool = False


_LONG_AGO = -1


class SharedParameters:
    """All parameters of a model, which are gathered from all ranks while its modules need them, and freed again.

    Modules are followed forward and back. The first pass is recorded; later ones are fetched ahead.

    Args:
        model: Whose. Its parameters are empty from now on.
        parallel: The ranks that share them, and stage 3's settings.
        streams: Of the rank's GPU.
        stream: On which parameters are gathered.
    """

    def __init__(self, model: nn.Module, parallel: Parallel, streams: Streams, stream: OneStream) -> None:
        self._parallel, self._streams, self._stream = parallel, streams, stream
        ranks, threshold = parallel.ddp, parallel.stage3_param_persistence_threshold
        self.all = [
            Shared(p, number, p.numel(), p.shape, -(-p.numel() // ranks), p.numel() <= threshold)
            for number, p in enumerate(model.parameters())
        ]
        self.by_parameter = {id(one.parameter): one for one in self.all}
        self._taken: dict[int, list[Shared]] = {}  # module -> what it takes of others
        self._running: list[nn.Module] = []
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
        for one in self.all:
            self._free(one)

    def follow(self, model: nn.Module) -> None:
        """Follow the modules of a model from now on (DeepSpeed 0.19, deepspeed/runtime/zero/parameter_offload.py)."""
        model.register_forward_pre_hook(lambda *_: self._begin_pass())
        for module in list(model.modules()):
            _hook(module, self._entered, self._left)
        for module in model.modules():
            module._parameters = LentParameters(module._parameters, self._took)

    # -- gathering them

    def _gather(self, wanted: Iterable[Shared]) -> Gathering:
        """Begin to gather parameters that are away, on the current stream."""
        several = sorted(wanted, key=lambda one: one.number)
        first, ranks = several[0].parameter, self._parallel.ddp
        count = sum(one.count for one in several)
        sources = [self._source(one) for one in several]
        flat = torch.empty(count * ranks, dtype=first.dtype, device=first.device)
        together = len(several) > 1
        if together:
            self._streams.copied(flat[:count])
        del sources
        # The host sends it where the kernels are now.
        self._streams.current_stream().wait_stream(self._streams.main)
        sent = self._streams.send(ALL_GATHER, flat.nbytes, "", asynchronous=True)
        for one in several:
            one.state = COMING
        if together:
            self._streams.name([flat], COMMUNICATION)
        else:
            self._put(several[0], flat)
        return Gathering(sent, several, flat if together else None)

    def _finish(self, gathering: Gathering) -> None:
        """Wait for parameters, and copy them out of their buffer."""
        if gathering.is_over:
            return
        self._streams.wait_for(gathering.sent)
        for one in gathering.several:
            if gathering.buffer is not None:
                whole = torch.empty(one.numel, dtype=gathering.buffer.dtype, device=gathering.buffer.device)
                self._streams.copied(whole)
                self._put(one, whole)
            one.state = HERE
        gathering.is_over = True

    def gather_each(self, wanted: Iterable[Shared]) -> None:
        """Gather parameters one by one, and wait for them (`_allgather_params_coalesced`)."""
        away = [one for one in wanted if one.state == AWAY]
        sources = [self._source(one) for one in away]
        wholes = [
            torch.empty(one.count * self._parallel.ddp, dtype=one.parameter.dtype, device=one.parameter.device)
            for one in away
        ]
        for one, whole in zip(away, wholes, strict=True):
            self._streams.send(ALL_GATHER, whole.nbytes, "")
            self._put(one, whole)
            one.state = HERE
        del sources

    def _free(self, one: Shared) -> None:
        """Leave a parameter without elements."""
        one.parameter.data = torch.empty(0, dtype=one.parameter.dtype, device=one.parameter.device)
        one.state = AWAY

    def _put(self, one: Shared, whole: Tensor) -> None:
        self._streams.name([whole], GATHERED)
        one.parameter.data = whole[: one.numel].view(one.shape)

    def _source(self, one: Shared) -> Tensor | None:
        """Return the rank's part, which is copied from host memory where it lies there."""
        if not self._parallel.offload_param:
            return one.part
        copy = self._streams.empty(one.count, one.parameter, COMMUNICATION)
        self._streams.copied(copy)
        return copy

    # -- following modules

    def _begin_pass(self) -> None:
        """Begin a forward pass of the whole model."""
        self._wait_for_rest()
        if not self._complete and self._records:
            self._complete = True
            self._prepare()
        self._records = True
        self._to_come = deque((one, at) for at, m in enumerate(self._order) for one in self._sorted(m))
        self._fetched_for = {}
        self._at = self._gathered = 0

    @torch.no_grad()
    def _entered(self, module: nn.Module, forward: bool) -> None:
        """Fetch what a module needs, and begin to fetch what comes after it."""
        if forward:
            self._running.append(module)
        self._compare(module)
        if self._records and not self._complete:
            self._order.append(module)
        if not forward:
            self._backward.setdefault(module, set())
        wanted = self._sorted(module)
        self._begin([one for one in wanted if one.state == AWAY])
        again = forward and torch._C._current_graph_task_id() != -1 and self._backward
        for one in wanted:
            one.users.add(id(module))
            if again and not one.parameter.requires_grad:
                last = next(reversed(self._backward))
                self._backward[last].add(one)
                one.users.add(id(last))
            if (gathering := self._coming.pop(one, None)) is not None:
                with self._streams.stream(self._stream):
                    self._finish(gathering)
        self._streams.current_stream().wait_stream(self._stream)
        if self._complete:
            self._fetch_ahead(wanted)
        self._at += 1

    @torch.no_grad()
    def _left(self, module: nn.Module, forward: bool) -> None:
        """Free what a module needed, but for what is used again soon."""
        while forward and self._running and self._running.pop() is not module:
            pass  # a checkpoint left it early
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
            for one in dict.fromkeys((*self._sorted(module), *sorted(again, key=lambda one: one.number))):
                one.users.discard(id(module))
                if not one.stays:
                    self._release(one)
        self._backward.clear()

    def free_all(self) -> None:
        """Free all parameters, before an update."""
        self._wait_for_rest()
        for one in self.all:
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
        """Return whether a parameter may be freed: it is not used again within so many elements, nor was it passed over
        when parameters were fetched ahead."""
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
        self._begin(ahead)

    def _begin(self, several: list[Shared]) -> None:
        if not several:
            return
        self._gathered += sum(one.numel for one in several)
        with self._streams.stream(self._stream):
            gathering = self._gather(several)
        for one in several:
            self._coming[one] = gathering

    def _release(self, one: Shared) -> None:
        if one.state == HERE and not one.users:
            self._free(one)
            self._gathered -= one.numel

    def _wait_for_rest(self) -> None:
        coming, self._coming = self._coming, {}
        while coming:
            one, gathering = coming.popitem()
            self._finish(gathering)
            del gathering
            self._release(one)

    def _sorted(self, module: nn.Module) -> list[Shared]:
        """Return the parameters of a module itself, and those that it takes from others, in their order."""
        own = {self.by_parameter[id(p)] for p in dict.values(module._parameters) if p is not None}
        return sorted(own.union(self._taken.get(id(module), ())), key=lambda one: one.number)

    @torch.no_grad()
    def _took(self, parameter: nn.Parameter) -> None:
        """Fetch another module's parameter for the one that takes it, now and from now on."""
        one = self.by_parameter.get(id(parameter))
        if one is not None and one.state == AWAY and self._running:
            self._taken.setdefault(id(self._running[-1]), []).append(one)
            self.gather_each([one])


def _hook(
    module: nn.Module, entered: Callable[[nn.Module, bool], None], left: Callable[[nn.Module, bool], None]
) -> None:
    """Let `entered(module, forward)` and `left(module, forward)` be called around a module's passes. Its backward pass
    begins with the gradient of its output, and is over when those of all inputs are there that were given by place."""
    waiting = begun = 0  # inputs without a gradient so far, and passes whose backward pass is to come

    def begin() -> None:
        nonlocal begun
        if begun:
            entered(module, False)
            begun -= 1

    def end() -> None:
        nonlocal waiting
        waiting -= 1
        if not waiting:
            left(module, False)

    def mark_inputs(_module: nn.Module, inputs: Any) -> Any:
        nonlocal waiting
        waiting = 0

        def mark(tensor: Tensor) -> Tensor:
            nonlocal waiting
            waiting += tensor.requires_grad
            return _Mark.apply(tensor, end)

        return tree_map_only(Tensor, mark, inputs)

    def mark_output(_module: nn.Module, _inputs: object, output: Any) -> Any:
        def mark(tensor: Tensor) -> Tensor:
            nonlocal begun
            begun += 1
            return _Mark.apply(tensor, begin)

        return tree_map_only(Tensor, mark, output)

    module.register_forward_pre_hook(lambda *_: entered(module, True))
    module.register_forward_hook(lambda *_: left(module, True))
    module.register_forward_hook(mark_output)
    module.register_forward_pre_hook(mark_inputs)


class _Mark(torch.autograd.Function):
    """Calls a function when a tensor's gradient comes by."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None


class LentParameters(dict):
    """A module's parameters, of which other modules may take one.

    Args:
        own: Name -> parameter.
        taken: Called with a parameter that is taken.
    """

    def __init__(self, own: dict[str, nn.Parameter | None], taken: Callable[[nn.Parameter], None]) -> None:
        super().__init__(own)
        self._taken = taken

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._taken(parameter)
        return parameter


@contextlib.contextmanager
def frugal_linear() -> Iterator[None]:
    """While entered, `nn.functional.linear` keeps the weight itself for the backward pass: a view of it would keep the
    gathered weight alive."""

    def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # torch's names
        return _Linear.apply(input, weight, bias)

    with replaced(nn.functional, "linear", linear):
        yield


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        if x.dim() == 2 and bias is not None:
            return torch.addmm(bias, x, weight.t())
        y = x.matmul(weight.t())
        if bias is not None:
            y += bias
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        of_x = gradient.matmul(weight) if ctx.needs_input_grad[0] else None
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_weight = rows.t().matmul(x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if bias is not None and ctx.needs_input_grad[2] else None
        return of_x, of_weight, of_bias
