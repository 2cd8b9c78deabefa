"""Answers without a trace, many at a time: requests that arrive together are worked on together.

Start reading at `FastEstimates`. One thread computes, so that a process answers its other requests meanwhile.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conf.errors import CommandError
from farm.serving.problems import Scrubber, invalid
from featurize.device_spec import DeviceSpec, describe_device

if TYPE_CHECKING:
    from farm.serving.questions import ClientQuestion
    from featurize.trial import TrialConfig
    from learn.estimation.job_estimate import Estimate

TOGETHER = 32  # questions of one turn: the last waits some 10 ms for the others
_REMEMBERED = 20_000


@dataclass
class _Waiting:
    config: TrialConfig
    device: str
    machine: str | None
    answer: asyncio.Future[bytes]
    key: str


class FastEstimates:
    """The fast path of one process, with a cache of its answers.

    Args:
        data: Data folder with calibrated machines.
        scrubber: Takes the server's paths out of the answers.
    """

    def __init__(self, data: str, scrubber: Scrubber) -> None:
        self.data, self._scrubber = data, scrubber
        self._waiting: deque[_Waiting] = deque()
        self._thread = ThreadPoolExecutor(1, "fast")
        self._busy = False
        self._cache: OrderedDict[str, bytes] = OrderedDict()
        self.hits = self.misses = 0

    def warm_up(self) -> None:
        """Load the models, so that the first request does not wait for them."""
        from learn.admission import admitting  # noqa: F401
        from learn.estimation.estimating import estimate_many

        config = {"family": "mlp", "batch_size": 8, "input_size": 8, "classes": 2, "depth": 1}
        estimate_many([config], method="fast", data=self.data)

    async def estimate(self, question: ClientQuestion) -> bytes:
        """Return the JSON text of the estimate. Raises `Problem`."""
        assert question.config is not None
        key = question.text
        if (known := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            self.hits += 1
            return known
        self.misses += 1
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        values = question.values
        self._waiting.append(_Waiting(question.config, values["device"], values["machine"], answer, key))
        self._start()
        return await answer

    async def run(self, work: Callable[[], Any]) -> Any:
        """Run `work` in the thread, after what waits there."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        if self._busy or not self._waiting:
            return
        self._busy = True
        turn = [self._waiting.popleft() for _ in range(min(TOGETHER, len(self._waiting)))]
        turn = [one for one in turn if not one.answer.done()]  # of the others, the clients have gone
        loop = asyncio.get_running_loop()
        done = loop.run_in_executor(self._thread, self._answers, turn)
        done.add_done_callback(lambda future: self._hand_out(turn, future))

    def _hand_out(self, turn: Sequence[_Waiting], done: asyncio.Future[list[bytes | Exception]]) -> None:
        self._busy = False
        error = done.exception()
        answers = [error] * len(turn) if error is not None else done.result()
        for one, answer in zip(turn, answers, strict=True):
            if isinstance(answer, bytes):
                self._cache[one.key] = answer
                if len(self._cache) > _REMEMBERED:
                    self._cache.popitem(last=False)
            if one.answer.done():  # the client has gone
                continue
            if isinstance(answer, bytes):
                one.answer.set_result(answer)
            elif answer is not None:
                one.answer.set_exception(answer)
        self._start()

    def _answers(self, turn: Sequence[_Waiting]) -> list[bytes | Exception]:
        """Return the answer or the problem of each, in order. Runs in the thread."""
        answers: list[bytes | Exception] = [RuntimeError("not answered")] * len(turn)
        groups: dict[tuple[str, str | None], list[int]] = {}
        for place, one in enumerate(turn):
            groups.setdefault((one.device, one.machine), []).append(place)
        for (device, machine), places in groups.items():
            for place, answer in zip(places, self._of_group([turn[at] for at in places], device, machine), strict=True):
                answers[place] = answer
        return answers

    def _of_group(self, group: Sequence[_Waiting], device: str, machine: str | None) -> list[bytes | Exception]:
        try:
            return [self._text(done) for done in self.estimates([one.config for one in group], device, machine)]
        except Exception as error:  # a config that cannot be answered takes no other one with it
            if len(group) == 1:
                return [_problem(error, self._scrubber)]
            return [answer for one in group for answer in self._of_group([one], device, machine)]

    def estimates(self, configs: Sequence[TrialConfig], device: str, machine: str | None) -> list[Estimate]:
        """Return the estimate of each config. Runs in the thread."""
        from learn.estimation.fast_estimates import fast_estimates
        from learn.estimation.on_machine import machine_for

        spec = describe_device(device)
        return fast_estimates(configs, spec, machine_for(machine, spec, self.data))

    def _text(self, done: Estimate) -> bytes:
        return json.dumps(self._scrubber.values(done.to_mapping()), allow_nan=False).encode()


def fits_of(
    fast: FastEstimates, config: TrialConfig, devices: Sequence[str], by: str, machine: str | None
) -> list[dict[str, Any]]:
    """Return which GPU models a config fits, the smallest card first. Runs in the fast path's thread."""
    from featurize.architecture import NVIDIA
    from learn.estimation.fits import DeviceFit, needed_mib

    fits = []
    specs: list[DeviceSpec] = [describe_device(name) for name in devices]
    for spec in sorted(specs, key=lambda one: (one.memory_mib, one.name)):
        if spec.architecture.vendor != NVIDIA:
            problem = "the fast path was distilled on NVIDIA GPUs; ask with method full"
            fits.append(DeviceFit(device=spec.name, fits=None, room_mib=None, estimate=None, problem=problem))
            continue
        (done,) = fast.estimates([config], spec.name, machine)
        room_mib = spec.memory_mib - needed_mib(done, by)
        fits.append(DeviceFit(device=spec.name, fits=room_mib >= 0, room_mib=room_mib, estimate=done))
    return [one.to_mapping() for one in fits]


def largest_batch_of(
    fast: FastEstimates, config: TrialConfig, device: str, by: str, machine: str | None
) -> dict[str, Any]:
    """Return the largest batch of a config that fits a GPU model. Runs in the fast path's thread."""
    from dataclasses import replace

    from learn.estimation.batch_search import largest_fitting
    from learn.estimation.fits import LargestBatch, needed_mib

    done: dict[int, Estimate] = {}

    def needed(batch: int) -> float:
        (done[batch],) = fast.estimates([replace(config, batch_size=batch)], device, machine)
        return needed_mib(done[batch], by)

    batch = largest_fitting(needed, describe_device(device).memory_mib, config.batch_size)
    tried = {size: needed_mib(one, by) for size, one in done.items()}
    return LargestBatch(
        batch=batch, estimate=done.get(batch), beyond=done.get(batch + 1), by=by, tried=tried
    ).to_mapping()


def admission(
    fast: FastEstimates, jobs: Sequence[TrialConfig | Mapping[str, Any]], gpu: Mapping[str, Any], **limits: Any
) -> dict[str, Any]:
    """Return whether the first job may join the others. Runs in the fast path's thread.

    Args:
        jobs: Trial configs that the fast path knows, or figures of a `JobProfile`.
        gpu: `device`, `memory_mib`, `used_mib`.
        **limits: `risk` and `max_slowdown`, as `learn.admit` takes them.
    """
    from learn.admission.admitting import admit
    from learn.admission.gpu_state import GpuState
    from learn.collocation.profile import JobProfile

    known = [
        JobProfile(**job) if isinstance(job, Mapping) else fast.estimates([job], gpu["device"], None)[0] for job in jobs
    ]
    state = GpuState(jobs=tuple(known[1:]), **gpu)
    return admit(known[0], state, data=fast.data, **limits).to_mapping()


def _problem(error: Exception, scrubber: Scrubber) -> Exception:
    """Return what a config that the fast path stumbles over says to the client."""
    if isinstance(error, CommandError):
        return invalid(scrubber.text(str(error)), "/config")
    if isinstance(error, ArithmeticError | ValueError):
        return invalid("the job's sizes are beyond what the fast path can count", "/config")
    return error
