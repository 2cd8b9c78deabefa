"""One rank of stage 3 of DeepSpeed's ZeRO in a trace: modules gather their parameters, and free them again.

Start reading at `ZeroShardedRank` (DeepSpeed 0.19, deepspeed/runtime/zero/stage3.py), then `SharedParameters.follow`
(partitioned_param_coordinator.py; gathering is that of partition_parameters.py, `all_gather_coalesced`,
`AllGatherCoalescedHandle`, `_partition_param`). Real ranks test it (tests/featurize/test_zero.py).
"""

from __future__ import annotations

import bisect
import contextlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from featurize.job.layout import Zero
from featurize.operators.replacing import replaced
from featurize.recording.step_trace import BUCKET, COMMUNICATION, GATHERED, UNREDUCED
from featurize.timing.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from featurize.training.rank import OneStream, Streams
from featurize.training.training_step import MakeOptimizer
from featurize.training.zero import FLAG, NORM, ZeroRank, gradient_of, norms_of


class ZeroShardedRank(ZeroRank):
    """A rank of stage 3. Parameters are empty except while modules need them. The rank keeps a part of each gradient,
    in one buffer for the whole training (`__add_grad_to_ipg_bucket`, `__avg_scatter_grads`, `partition_grads`), and
    updates them group by group."""

    def _spread(self, model: nn.Module, trained: list[nn.Parameter]) -> None:
        zero, streams = self._zero, self._streams
        overlaps = zero.overlap_comm is not False
        gathers, self._reduces = ((streams.Stream() if overlaps else streams.main) for _ in range(2))
        with self.recorder:
            self._shared = SharedParameters(model, zero, self._ranks, streams, gathers)
            self._trained = [shared for shared in self._shared.all if shared.parameter.requires_grad]
            self._counts = [shared.count for shared in self._trained]
            self._flat = None if zero.offload_param else self._make_parts()
        self._shared.follow(model)

    def _make_parts(self) -> Tensor:
        """Return the rank's parts of trained parameters in one buffer. Other parameters have a buffer each."""
        flat = self._streams.empty(sum(self._counts), self._trained[0].parameter, "parameter")
        for shared, part in zip(self._trained, flat.split(self._counts), strict=True):
            shared.part = part
        for shared in self._shared.all:
            if not shared.parameter.requires_grad:
                shared.part = self._streams.empty(shared.count, shared.parameter, "parameter")
        return flat

    def _make_masters(self, make: MakeOptimizer) -> None:
        first = self._trained[0].parameter
        self._groups: list[list[Shared]] = [[]]  # parameters that are updated together (`_create_fp16_sub_groups`)
        count = 0
        for shared in self._trained:
            if count >= self._zero.sub_group_size:
                self._groups.append([])
                count = 0
            self._groups[-1].append(shared)
            count += shared.count
        for group in () if self._offloads else self._groups:
            copy = torch.empty(sum(shared.count for shared in group), device=first.device)
            self._add_master(make, copy.clone())
        self._bucket: Tensor | None = None
        self._parts: dict[Shared, Tensor] = {}  # the rank's parts of the gradients
        if self._zero.contiguous_gradients:
            self._bucket = self._streams.empty(self._zero.reduce_bucket_size, first, BUCKET)
        if not self._offloads:
            self._gradients = torch.zeros(sum(self._counts), dtype=first.dtype, device=first.device)
            self._streams.name([self._gradients], "gradient")
            self._parts = dict(zip(self._trained, self._gradients.split(self._counts), strict=True))

    # -- gradients

    def _arrived(self, parameter: Tensor) -> None:
        self._streams.name([gradient_of(parameter)], UNREDUCED)
        self._add(parameter)

    def _move(self, parameter: Tensor, *, fits: bool) -> None:
        self._reduces.wait_stream(self._streams.current_stream())
        if self._bucket is not None and fits:
            with self._streams.stream(self._reduces):
                gradient = gradient_of(parameter)
                place = self._bucket.narrow(0, self._elements, gradient.numel()).view(gradient.shape)
                place.copy_(gradient)
                gradient.data = place

    def _end_backward(self) -> None:
        self._reduce()
        self._streams.current_stream().wait_stream(self._reduces)
        self._shared.end_backward()

    def _reduce_all(self, waiting: list[Tensor]) -> None:
        several = sorted((self._shared.by_parameter[id(p)] for p in waiting), key=lambda shared: shared.number)
        with self._streams.stream(self._reduces):
            received = self._received_parts(several).split([shared.count for shared in several])
            for shared, padded in zip(several, received, strict=True):
                # Only elements that are not padding.
                count = max(min(shared.count, shared.numel - self._rank * shared.count), 0)
                if count:
                    self._keep(shared, padded.narrow(0, 0, count))
                shared.parameter.grad = None

    def _received_parts(self, several: Sequence[Shared]) -> Tensor:
        """Return the parts that the rank receives, padded."""
        ranks, count = self._ranks, sum(shared.count for shared in several)
        gradient = gradient_of(several[0].parameter)
        if len(several) == 1 and not several[0].numel % ranks:
            together = gradient.view(-1)
        else:  # each rank's parts are joined
            together = self._streams.empty(count * ranks, gradient, COMMUNICATION)
            self._streams.copied(together)
        together.div_(ranks)
        self._streams.send(REDUCE_SCATTER, together.nbytes, "")
        return together.narrow(0, self._rank * count, count)

    def _keep(self, shared: Shared, part: Tensor) -> None:
        """Keep a part; those of the step's later backward passes are added."""
        first = self._passes == 1
        if not self._offloads:
            stored_part = self._parts[shared].narrow(0, 0, part.numel())
            stored_part.copy_(part) if first else stored_part.add_(part)
            return
        self._streams.copied(part)
        back = torch.empty_like(part)  # from host memory
        if not first:
            back.add_(part)
        if self.is_boundary():
            norms_of([back])
            self._streams.copied(back.to(torch.float32))

    # -- the update

    @torch.no_grad()
    def step(self) -> None:
        self._shared.free_all()
        dtype = self._trained[0].parameter.dtype
        if dtype is torch.float16:
            for look in (torch.isinf, torch.isnan) if self.inner else ():
                look(self._gradients).any()
            self._streams.send(ALL_REDUCE, FLAG, "")
        for group in self._groups:
            if norms := norms_of(self._gradients_of(group)):
                torch.stack(norms).pow(2.0).sum()
            del norms
            self._streams.send(ALL_REDUCE, 2 * NORM, "")
        counts = [sum(shared.count for shared in group) for group in self._groups]
        parts = [None] * len(counts) if self._flat is None else self._flat.split(counts)
        for number, (group, part) in enumerate(zip(self._groups, parts, strict=True)):
            if self.inner:
                master = self._update_master(number, self._gradients_of(group), scales=True)
                if part is not None:
                    part.copy_(master)
                master.grad = None
            elif part is not None:
                self._streams.copied(part)  # from host memory
        self._shared.gather_each(shared for shared in self._shared.all if shared.stays)

    def _gradients_of(self, group: Sequence[Shared]) -> list[Tensor]:
        return [] if self._offloads else [self._parts[shared] for shared in group]


AWAY, COMING, HERE = "away", "coming", "here"


@dataclass(eq=False)
class Shared:
    """One parameter.

    number    its index in the model
    count     elements of a rank's part, the same on all ranks
    stays     whether it is small, and is gathered once a step
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
    """Parameters being gathered; none once they were waited for. Several share one buffer, which lives until each of
    them was used."""

    sent: int
    several: Sequence[Shared]
    buffer: Tensor | None


_LONG_AGO = -1


class SharedParameters:
    """All parameters of a model, which are gathered from all ranks while its modules need them, and freed again.

    Modules are followed forward and backward. The first pass is recorded; later ones prefetch.

    Args:
        model: The model. Its parameters are empty from now on.
        zero: Stage 3's settings.
        ranks: Number of ranks that share them.
        streams: The streams of the rank's GPU.
        stream: The stream on which parameters are gathered.
    """

    def __init__(self, model: nn.Module, zero: Zero, ranks: int, streams: Streams, stream: OneStream) -> None:
        self._zero, self._ranks, self._streams, self._stream = zero, ranks, streams, stream
        threshold = zero.stage3_param_persistence_threshold
        self.all = [
            Shared(p, number, p.numel(), p.shape, -(-p.numel() // ranks), p.numel() <= threshold)
            for number, p in enumerate(model.parameters())
        ]
        self.by_parameter = {id(shared.parameter): shared for shared in self.all}
        self._taken: dict[int, list[Shared]] = {}  # id of a module -> parameters that it takes from others
        self._running: list[nn.Module] = []
        self._order: list[nn.Module] = []  # order of the recorded pass
        self._records = self._complete = False
        self._before: list[int] = [0]  # index in the order -> elements of all modules before it
        self._uses: defaultdict[Shared, list[int]] = defaultdict(list)  # -> indices of the modules that use it
        self._sequence: list[tuple[Shared, int]] = []  # each use of a parameter, with the module's index
        self._to_come: deque[tuple[Shared, int]] = deque()  # the rest of it
        self._fetched_for: dict[Shared, int] = {}  # -> index of the last module that it was fetched for
        self._at = 0  # index of the next module
        self._gathered = 0  # elements
        self._coming: dict[Shared, Gathering] = {}
        # modules in their backward pass -> parameters of recomputation
        self._backward: dict[nn.Module, set[Shared]] = {}
        for shared in self.all:
            self._free(shared)

    def follow(self, model: nn.Module) -> None:
        """Follow the modules of a model from now on (DeepSpeed 0.19, deepspeed/runtime/zero/parameter_offload.py)."""
        model.register_forward_pre_hook(lambda *_: self._begin_pass())
        for module in list(model.modules()):
            _hook(module, self._entered, self._left)
            module._parameters = LentParameters(module._parameters, self._took)

    # -- gathering

    def _begin(self, wanted: Sequence[Shared]) -> None:
        """Begin to gather parameters that are not present, on their own stream."""
        if not wanted:
            return
        several = sorted(wanted, key=lambda shared: shared.number)
        count, together = sum(shared.count for shared in several), len(several) > 1
        with self._streams.stream(self._stream):
            sources = [self._source(shared) for shared in several]
            kind = COMMUNICATION if together else GATHERED
            flat = self._streams.empty(count * self._ranks, several[0].parameter, kind)
            if together:
                self._streams.copied(flat[:count])
            del sources
            self._stream.wait_stream(self._streams.main)  # the host launches it at the kernels' present moment
            sent = self._streams.send(ALL_GATHER, flat.nbytes, "", asynchronous=True)
        if not together:
            self._put(several[0], flat)
        gathering = Gathering(sent, several, flat if together else None)
        for shared in wanted:
            shared.state, self._coming[shared] = COMING, gathering
            self._gathered += shared.numel

    def _finish(self, gathering: Gathering) -> None:
        """Wait for parameters, and copy them out of their buffer."""
        self._streams.wait_for(gathering.sent)
        for shared in gathering.several:
            if gathering.buffer is not None:
                full = self._streams.empty(shared.numel, gathering.buffer, GATHERED)
                self._streams.copied(full)
                self._put(shared, full)
            shared.state = HERE
        gathering.several = ()

    def gather_each(self, wanted: Iterable[Shared]) -> None:
        """Gather parameters one by one, and wait for them (`_allgather_params_coalesced`)."""
        away = [shared for shared in wanted if shared.state == AWAY]
        sources = [self._source(shared) for shared in away]
        wholes = [self._streams.empty(shared.count * self._ranks, shared.parameter, GATHERED) for shared in away]
        for shared, full in zip(away, wholes, strict=True):
            self._streams.send(ALL_GATHER, full.nbytes, "")
            self._put(shared, full)
            shared.state = HERE
        del sources

    def _free(self, shared: Shared) -> None:
        """Leave a parameter without elements."""
        shared.parameter.data = torch.empty(0, dtype=shared.parameter.dtype, device=shared.parameter.device)
        shared.state = AWAY

    def _put(self, shared: Shared, full: Tensor) -> None:
        shared.parameter.data = full[: shared.numel].view(shared.shape)

    def _source(self, shared: Shared) -> Tensor | None:
        """Return the rank's part, copied from host memory if it lies there."""
        if not self._zero.offload_param:
            return shared.part
        copy = self._streams.empty(shared.count, shared.parameter, COMMUNICATION)
        self._streams.copied(copy)
        return copy

    # -- following modules

    def _begin_pass(self) -> None:
        """Begin a forward pass of the whole model."""
        self._wait_for_rest()
        if not self._complete and self._records:
            self._complete = True
            of_modules = [self._ordered_parameters(module) for module in self._order]
            self._before = [0, *accumulate(sum(shared.numel for shared in several) for several in of_modules)]
            self._sequence = [(shared, place) for place, several in enumerate(of_modules) for shared in several]
            self._uses = defaultdict(list)
            for shared, place in self._sequence:
                self._uses[shared].append(place)
        self._records = True
        self._to_come = deque(self._sequence)
        self._fetched_for = {}
        self._at = self._gathered = 0

    @torch.no_grad()
    def _entered(self, module: nn.Module, forward: bool) -> None:
        """Fetch the parameters of a module, and begin to prefetch those of later modules."""
        if forward:
            self._running.append(module)
        if self._complete and (self._at >= len(self._order) or module is not self._order[self._at]):
            # The pass deviates from the recorded order.
            self._records = self._complete = False
            self._order = []
            self._wait_for_rest()
        if self._records and not self._complete:
            self._order.append(module)
        if not forward:
            self._backward.setdefault(module, set())
        wanted = self._ordered_parameters(module)
        self._begin([shared for shared in wanted if shared.state == AWAY])
        again = forward and torch._C._current_graph_task_id() != -1 and self._backward
        for shared in wanted:
            shared.users.add(id(module))
            if again and not shared.parameter.requires_grad:
                last = next(reversed(self._backward))
                self._backward[last].add(shared)
                shared.users.add(id(last))
            if (gathering := self._coming.pop(shared, None)) is not None:
                with self._streams.stream(self._stream):
                    self._finish(gathering)
        self._streams.current_stream().wait_stream(self._stream)
        if self._complete:
            self._fetch_ahead(wanted)
        self._at += 1

    @torch.no_grad()
    def _left(self, module: nn.Module, forward: bool) -> None:
        """Free the parameters of a module, except those that are used again soon."""
        while forward and self._running and self._running.pop() is not module:
            pass  # a checkpoint left it early
        wanted = set(self._ordered_parameters(module))
        freed = {shared for shared in wanted if not self._complete or self._can_go(shared)}
        if not forward:
            again = self._backward.pop(module, set())
            wanted |= again
            freed |= {shared for shared in again if not shared.stays}
        for shared in sorted(wanted, key=lambda shared: shared.number):
            shared.users.discard(id(module))
            if shared in freed:
                self._release(shared)

    def end_backward(self) -> None:
        """Free the parameters of modules whose inputs need no gradient."""
        for module, again in reversed(self._backward.items()):
            for shared in dict.fromkeys(
                (*self._ordered_parameters(module), *sorted(again, key=lambda shared: shared.number))
            ):
                shared.users.discard(id(module))
                if not shared.stays:
                    self._release(shared)
        self._backward.clear()

    def free_all(self) -> None:
        """Free all parameters, before an update."""
        self._wait_for_rest()
        for shared in self.all:
            shared.users.clear()
            self._release(shared)

    def _can_go(self, shared: Shared) -> bool:
        """Return whether a parameter may be freed: it is not used again within this many elements, and prefetching has
        not skipped it."""
        if shared.stays or self._fetched_for.get(shared, _LONG_AGO) > self._at:
            return False
        uses = self._uses[shared]
        following = bisect.bisect_left(uses, self._at)
        if following == len(uses):
            return True
        return self._before[uses[following]] - self._before[self._at] >= self._zero.stage3_max_reuse_distance

    def _fetch_ahead(self, wanted: list[Shared]) -> None:
        missing = {shared for shared in wanted if self._fetched_for.get(shared, _LONG_AGO) < self._at}
        visited: set[Shared] = set()
        while self._to_come and len(visited) < len(missing):
            shared, place = self._to_come.popleft()
            self._fetched_for[shared] = place
            visited.add(shared)
        most = min(self._zero.stage3_max_live_parameters - self._gathered, self._zero.stage3_prefetch_bucket_size)
        ahead: list[Shared] = []
        elements = 0
        while self._to_come and elements < most:
            shared, place = self._to_come.popleft()
            self._fetched_for[shared] = max(self._fetched_for.get(shared, _LONG_AGO), place)
            if shared.state == AWAY and shared not in ahead:
                ahead.append(shared)
                elements += shared.numel
        self._begin(ahead)

    def _release(self, shared: Shared) -> None:
        if shared.state == HERE and not shared.users:
            self._free(shared)
            self._gathered -= shared.numel

    def _wait_for_rest(self) -> None:
        coming, self._coming = self._coming, {}
        while coming:
            shared, gathering = coming.popitem()
            self._finish(gathering)
            del gathering
            self._release(shared)

    def _ordered_parameters(self, module: nn.Module) -> list[Shared]:
        """Return the parameters of a module itself, and those that it takes from others, in order."""
        own_shared = {self.by_parameter[id(p)] for p in dict.values(module._parameters) if p is not None}
        return sorted(own_shared.union(self._taken.get(id(module), ())), key=lambda shared: shared.number)

    @torch.no_grad()
    def _took(self, parameter: nn.Parameter) -> None:
        """Fetch another module's parameter for the module that takes it, now and from now on."""
        shared = self.by_parameter.get(id(parameter))
        if shared is not None and shared.state == AWAY and self._running:
            self._taken.setdefault(id(self._running[-1]), []).append(shared)
            self.gather_each([shared])


def _hook(
    module: nn.Module, on_entry: Callable[[nn.Module, bool], None], on_exit: Callable[[nn.Module, bool], None]
) -> None:
    """Make `on_entry(module, forward)` and `on_exit(module, forward)` be called around a module's passes. Its backward
    pass begins with the gradient of its output, and ends when the gradients of all positional inputs are computed."""
    waiting: Counter[str] = Counter()  # inputs and outputs without a gradient so far

    def begin() -> None:
        if waiting["outputs"]:
            waiting["outputs"] -= 1
            on_entry(module, False)

    def end() -> None:
        waiting["inputs"] -= 1
        if not waiting["inputs"]:
            on_exit(module, False)

    def marked(value: Any, kind: str, then: Callable[[], None]) -> Any:
        def mark(tensor: Tensor) -> Any:
            waiting[kind] += tensor.requires_grad
            return _Mark.apply(tensor, then)

        return tree_map_only(Tensor, mark, value)

    def mark_inputs(_module: nn.Module, inputs: Any) -> Any:
        waiting["inputs"] = 0
        return marked(inputs, "inputs", end)

    module.register_forward_pre_hook(lambda *_: on_entry(module, True))
    module.register_forward_hook(lambda *_: on_exit(module, True))
    module.register_forward_hook(lambda _module, _inputs, output: marked(output, "outputs", begin))
    module.register_forward_pre_hook(mark_inputs)


class _Mark(torch.autograd.Function):
    """Calls a function when a tensor's gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.function()
        return gradient, None


class LentParameters(dict[str, nn.Parameter | None]):
    """A module's parameters by name; other modules may take one of them, with which `on_take` is called."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], on_take: Callable[[nn.Parameter], None]) -> None:
        super().__init__(parameters)
        self._taken = on_take

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._taken(parameter)
        return parameter


def frugal_linear() -> contextlib.AbstractContextManager[None]:
    """Make `nn.functional.linear` keep the weight itself for the backward pass while entered: a view would keep the
    gathered weight alive."""
    return replaced(nn.functional, "linear", _linear)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:  # torch's names
    output: Tensor = _Linear.apply(input, weight, bias)
    return output


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
