"""One rank of stage 3 of DeepSpeed's ZeRO in a trace: modules gather their parameters, and free them again.

Start reading at `zero_rank` (DeepSpeed 0.19, deepspeed/runtime/zero/stage3.py). Real ranks are the test of it
(tests/featurize/test_zero.py).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from featurize.optimizers import run_step, state_tensors
from featurize.parallel.collectives import ALL_REDUCE
from featurize.parallel.layout import Parallel
from featurize.parallel.streams import Streams
from featurize.parallel.zero_fetching import Fetching
from featurize.parallel.zero_gradients import flattened
from featurize.parallel.zero_hooks import LentParameters, frugal_linear, hook_modules
from featurize.parallel.zero_rank import FLAG, NORM, Make, Passes, ZeroRank, one_type
from featurize.parallel.zero_scattering import ScatteredGradients
from featurize.parallel.zero_shards import AWAY, Shared, SharedParameters
from featurize.step_trace import MASTER
from featurize.training_settings import Training


@contextlib.contextmanager
def zero_rank(parallel: Parallel, rank: int, settings: Training) -> Iterator[ZeroRank | ZeroShardedRank]:
    """Play one rank of the layout's stage, around whatever else changes what modules call.

    Args:
        parallel: Stage and settings.
        rank: Which one, from 0.
        settings: Of the training.
    """
    if parallel.zero != 3:
        yield ZeroRank(parallel, rank, settings)
        return
    with frugal_linear():
        yield ZeroShardedRank(parallel, rank, settings)


class ZeroShardedRank(Passes):
    """A model's wrapper in a trace. Arguments: as `Passes`."""

    def __init__(self, parallel: Parallel, rank: int, settings: Training) -> None:
        super().__init__(parallel, rank, settings)
        self._taken: dict[int, list[Shared]] = {}  # module -> what it takes of others
        self._running: list[nn.Module] = []

    @torch.no_grad()
    def wrapped(self, model: nn.Module) -> nn.Module:
        """Return the model, whose parameters are empty but while modules need them.

        Raises:
            UsageError: Those that train are of several types.
        """
        recorder, parallel, streams = self._streams.recorder, self._parallel, self._streams
        assert recorder is not None
        one_type(model)
        overlaps = parallel.overlap_comm is not False
        gathers, reduces = ((streams.Stream() if overlaps else streams.main) for _ in range(2))
        with recorder:
            self._shared = SharedParameters(
                model,
                parallel.ddp,
                parallel.stage3_param_persistence_threshold,
                streams,
                on_host=parallel.offload_param,
            )
            self._trained = [one for one in self._shared.all if one.parameter.requires_grad]
            self._flat = self._parts()
        self._fetching = Fetching(self._shared, self._of_module, streams, parallel, gathers)
        self._stream = reduces
        for one in self._trained:
            one.parameter.register_post_accumulate_grad_hook(self._arrived)
        model.register_forward_pre_hook(lambda *_: self._fetching.begin_pass())
        hook_modules(model, self._entered, self._left)
        for module in model.modules():
            module._parameters = LentParameters(module._parameters, self._took)
        return model

    def update(self, make: Make) -> ZeroShardedUpdate:
        """Return the optimizer of the rank's parts, after `wrapped`."""
        assert self._streams.recorder is not None
        with self._streams.recorder:
            update = ZeroShardedUpdate(
                make, self._groups(), self._flat, self._shared, self._fetching, self._streams, self._settings
            )
            update.gradients = self._gradients = ScatteredGradients(
                self._trained, self._rank, self._streams, self._parallel, self._stream,
                offloads=self._settings.offload_optimizer,
            )  # fmt: skip
        return update

    @property
    def elements(self) -> int:
        """Elements of the whole model's parameters."""
        return sum(one.numel for one in self._shared.all)

    def _parts(self) -> Tensor | None:
        """The rank's parts: in one buffer those that train, each of the others for itself. None: in host memory."""
        if self._parallel.offload_param:
            return None
        first, count = self._trained[0].parameter, sum(one.count for one in self._trained)
        flat = torch.empty(count, dtype=first.dtype, device=first.device)
        at = 0
        for one in self._shared.all:
            if one.parameter.requires_grad:
                one.part = flat.narrow(0, at, one.count)
                at += one.count
            else:
                one.part = torch.empty(one.count, dtype=one.parameter.dtype, device=one.parameter.device)
                self._streams.name([one.part], "parameter")
        self._streams.name([flat], "parameter")
        return flat

    def _groups(self) -> list[list[Shared]]:
        """Parameters that are updated together (`_create_fp16_sub_groups`)."""
        groups: list[list[Shared]] = [[]]
        count = 0
        for one in self._trained:
            if count >= self._parallel.sub_group_size:
                groups.append([])
                count = 0
            groups[-1].append(one)
            count += one.count
        return groups

    def _of_module(self, module: nn.Module) -> list[Shared]:
        own = [self._shared.by_parameter[id(p)] for p in dict.values(module._parameters) if p is not None]
        return own + self._taken.get(id(module), [])

    def _took(self, parameter: nn.Parameter) -> None:
        """A module takes another one's parameter: from now on it is fetched for it, too."""
        one = self._shared.by_parameter.get(id(parameter))
        if one is not None and one.state == AWAY and self._running:
            self._taken.setdefault(id(self._running[-1]), []).append(one)
            with torch.no_grad():
                self._shared.gather_each([one])

    @torch.no_grad()
    def _entered(self, module: nn.Module, forward: bool) -> None:
        if forward:
            self._running.append(module)
        self._fetching.entered(module, forward=forward)

    @torch.no_grad()
    def _left(self, module: nn.Module, forward: bool) -> None:
        if forward:
            while self._running and self._running.pop() is not module:
                pass  # a checkpoint left it early
        self._fetching.left(module, forward=forward)

    def _arrived(self, parameter: Tensor) -> None:
        self._gradients.arrived(self._shared.by_parameter[id(parameter)], **self._place())

    def _end_backward(self) -> None:
        self._gradients.finish(**self._place())
        self._fetching.end_backward()

    def _place(self) -> dict[str, bool]:
        return {"first": self._passes == 1, "last": self._is_last()}


class ZeroShardedUpdate:
    """Updates the rank's parts, group after group, and gathers the small parameters.

    Args:
        make: Gives the optimizer of some parameters.
        groups: Parameters that are updated together.
        flat: The rank's parts of all of them; None where they are in host memory.
        shared: All parameters.
        fetching: Which frees them before.
        streams: Of the rank's GPU.
        settings: Of the training.
    """

    gradients: ScatteredGradients

    def __init__(
        self, make: Make, groups: Sequence[Sequence[Shared]], flat: Tensor | None, shared: SharedParameters,
        fetching: Fetching, streams: Streams, settings: Training,
    ) -> None:  # fmt: skip
        self._groups, self._flat, self._shared, self._fetching = groups, flat, shared, fetching
        self._streams, self._settings = streams, settings
        first = groups[0][0].parameter
        self._dtype, self._device = first.dtype, first.device
        self._masters: list[nn.Parameter] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        for group in () if settings.offload_optimizer else groups:
            count = sum(one.count for one in group)
            copy = torch.empty(count, device=self._device)
            master = nn.Parameter(copy.clone())
            streams.name([master], MASTER)
            self._masters.append(master)
            self._optimizers.append(make([master]))
        streams.name(state_tensors(self), "optimizer_state")  # Adagrad makes its own at once

    @property
    def state(self) -> Any:
        """Of the optimizers of all groups."""
        return {key: value for one in self._optimizers for key, value in one.state.items()}

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: gradients were freed as they were reduced."""

    @torch.no_grad()
    def step(self) -> None:
        """Free all parameters, check the gradients, take their norm, update the parts."""
        self._fetching.free_all()
        if self._dtype is torch.float16 and self._masters:
            for look in (torch.isinf, torch.isnan):
                look(self.gradients.whole).any()
        if self._dtype is torch.float16:
            self._streams.send(ALL_REDUCE, FLAG, "")
        for group in self._groups:
            self._norm(group)
            self._streams.send(ALL_REDUCE, 2 * NORM, "")
        at = 0
        for number, group in enumerate(self._groups):
            count = sum(one.count for one in group)
            part = None if self._flat is None else self._flat.narrow(0, at, count)
            at += count
            self._update(number, group, part)
        self._shared.gather_each(one for one in self._shared.all if one.stays)

    def _norm(self, group: Sequence[Shared]) -> None:
        norms = [torch.linalg.vector_norm(one.to(torch.float64)) for one in self._gradients_of(group)]
        if norms:
            torch.stack(norms).pow(2.0).sum()

    def _update(self, number: int, group: Sequence[Shared], part: Tensor | None) -> None:
        if self._masters:
            master = self._masters[number]
            flat = flattened(self._gradients_of(group))
            self._streams.name([flat], "gradient")
            master.grad = flat.to(torch.float32)
            self._streams.name([master.grad], "gradient")
            del flat
            master.grad.mul_(1.0)
            run_step(self._optimizers[number])
            if part is not None:
                part.copy_(master)
            master.grad = None
        elif part is not None and self._streams.recorder is not None:
            self._streams.recorder.copied([part])  # from host memory

    def _gradients_of(self, group: Sequence[Shared]) -> list[Tensor]:
        return [] if self._settings.offload_optimizer else self.gradients.of(group)
