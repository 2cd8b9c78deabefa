"""A simulated GPU: runs trials like a real one, but traces one training step and models it in virtual time.

Start reading at `SimulatedDevice.measure`. Its rows have the `source` `simulated` and a UUID that begins with `SIM-`.
`shared_speeds` models how much trials on one GPU slow each other down, from the load of each alone. The replay of a
cluster also uses it; no estimator does.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from workers.devices import TRACES_ONLY, DeviceChoice, Link, MemberAlone, Place, Slot, Together, TrialSettings

if TYPE_CHECKING:
    from featurize.device.device_spec import DeviceSpec
    from featurize.job.training_settings import TrialConfig
    from featurize.memory.replay import MemoryProfile
    from featurize.recording.step_trace import StepTrace
    from featurize.timing.simulation import SimulatedStep


SHARING = ("mps", "time_slicing")
_SWITCH = 0.05  # share of a kernel's time lost to context switches or a shared L2 cache; chosen, not measured


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """Load of a job that runs alone: shares of time with a kernel on the GPU, of SMs and of DRAM bandwidth, 0 to 1."""

    busy: float
    smact: float
    drama: float


def stalled_share(job: GpuLoad, partner: GpuLoad, sharing: str) -> float:
    """Return the share of a partner's kernel time in which the job's kernels stall.

    Under time slicing, kernels of two jobs take turns. Under MPS they run side by side as far as SMs and DRAM bandwidth
    suffice for both.
    """
    if sharing == "time_slicing" or not job.busy or not partner.busy:
        return 1.0
    sms = job.smact / job.busy + partner.smact / partner.busy - 1.0
    dram = job.drama / job.busy + partner.drama / partner.busy - 1.0
    return min(1.0, _SWITCH + max(0.0, sms, dram))


def shared_speeds(busy: Sequence[float], stalled: Sequence[Sequence[float]]) -> list[float]:
    """Return the speed of each job of a group as a share of its speed alone.

    The model is a closed queueing network. Alone, a job spends `busy` of its time at the GPU and the rest on the host;
    the GPU serves waiting jobs in turns. Mean value analysis solves it (Reiser and Lavenberg, J. ACM 27, 1980): a job
    finds at the GPU the queue that would be there without it. With shared processors that is exact for any lengths of
    kernels and pauses (Baskett et al., J. ACM 22, 1975). If partners stall a job only partly, the same share of the
    queue counts, which is an approximation.

    Args:
        busy: (n,) each job's share of time with a kernel on the GPU, alone.
        stalled: (n, n) share of the kernel time of job j in which job i stalls; the diagonal is ignored.
    """
    everyone = tuple(range(len(busy)))
    at_gpu: dict[tuple[int, ...], dict[int, float]] = {(): {}}  # group -> mean number of each member at the GPU
    speeds: dict[int, float] = {}
    for size in everyone:
        for group in itertools.combinations(everyone, size + 1):
            speeds = {}
            queued = {}
            for job in group:
                others = at_gpu[tuple(other for other in group if other != job)]
                stay = busy[job] * (1.0 + sum(stalled[job][other] * mean for other, mean in others.items()))
                speeds[job] = 1.0 / (1.0 - busy[job] + stay)
                queued[job] = speeds[job] * stay
            at_gpu[group] = queued
    return [speeds[job] for job in everyone]


def speeds_of_loads(loads: Sequence[GpuLoad], sharing: str) -> list[float]:
    """Return the speed of each job of a group as a share of its speed alone; 1 for a job alone."""
    if len(loads) < 2:
        return [1.0] * len(loads)
    stalled = [[stalled_share(job, partner, sharing) for partner in loads] for job in loads]
    return shared_speeds([load.busy for load in loads], stalled)


_SAMPLE_PERIOD_S = 0.1  # in virtual time; the default of real devices


class SimulatedDevice:
    """`count` (default 4) devices of the described model. Simulated memory is never allocated."""

    backend = "simulated"
    source = "simulated"
    sampled = False
    prepares = False  # tracing the step is all the work, and every core already has a trial

    def __init__(self, choice: DeviceChoice):
        from featurize.device.device_spec import DEFAULT_DEVICE, device_from_mapping, load_device

        self.spec = device_from_mapping(dict(choice.spec)) if choice.spec else load_device(DEFAULT_DEVICE)
        self.choice = choice
        self.count = choice.count or 4

    def slots(self) -> tuple[Slot, ...]:
        return tuple(
            Slot(
                index=index,
                device_name=self.spec.name,
                device_uuid=f"SIM-{self.spec.name}-{index}",
                device_memory_mib=self.spec.memory_mib,
                memory_fraction=self.choice.memory_fraction,
            )
            for index in range(self.count)
        )

    def environment(self, *slots: Slot) -> dict[str, str]:
        return {"CUDA_VISIBLE_DEVICES": "", TRACES_ONLY: "1"}

    def measure(
        self,
        config: TrialConfig,
        slot: Slot,
        settings: TrialSettings,
        seed: int,
        link: Link,
        place: Place | None = None,
    ) -> None:
        """Trace one step, model it, and report a run's events in a virtual time that starts at 0."""
        import torch

        from featurize.timing.simulation import ranks_of_stages, simulate
        from featurize.trace.tracer import trace_config

        torch.set_num_threads(1)
        torch.manual_seed(seed)
        trace = trace_config(config, device=self.spec)
        layout = config.layout
        of_stages: dict[int, SimulatedStep] = {}
        for stage, of_rank in ranks_of_stages(trace).items():
            memory = _replay_limited(of_rank, self.spec, config, slot.memory_fraction)
            of_stages[stage] = simulate(of_rank, self.spec, config, layout=layout, memory=memory)
        step = max(of_stages.values(), key=lambda step: step.peak_memory_mib)
        link.wait_for_go()
        link.report("built", parameters=step.trace.parameters)
        shown = alone_of(step)
        if not step.fits:
            raise SimulatedOutOfMemoryError(
                f"{self.spec.name} (simulated): the step needs {step.peak_memory_mib:.0f} MiB, "
                f"the device has {self.spec.memory_mib:.0f} MiB{_share(slot)}"
            )
        if link.together is not None:
            step, shown = beside(step, self.spec, link.together)
        window = settings.window
        step_s = step.step_time_ms / 1e3
        warmup_s = window.warmup_steps * step_s
        # All steps take the same time, so an adaptive window is steady once it is long enough.
        steps = max(window.min_steps, math.ceil(window.min_seconds / step_s))
        if window.kind == "adaptive":
            steps = max(1, min(steps, math.floor(window.max_seconds / step_s)))
        window_s = steps * step_s
        ended = "fixed" if window.kind == "fixed" else "steady" if window_s >= window.min_seconds else "max_seconds"
        link.report("warmup", t_ns=0)
        link.report("window", t_ns=round(warmup_s * 1e9))
        if layout is None:
            self._report_samples(step, shown, warmup_s, window_s, link, rank={})
        else:
            ranks = {stage * layout.of_stage: rank_step for stage, rank_step in of_stages.items()}
            for rank, rank_step in ranks.items():
                self._report_samples(rank_step, alone_of(rank_step), warmup_s, window_s, link, rank={"rank": rank})
            _report_ranks(layout.of_stage, ranks, steps, window_s, link)
        values = _labels(step, steps, window_s)
        link.report("result", window_end_ns=round((warmup_s + window_s) * 1e9), window_ended=ended, values=values)

        if settings.kernels.steps and link.together is None and link.labels_taken():
            self._report_priced(trace, config, link)

    def _report_priced(self, trace: StepTrace, config: TrialConfig, link: Link) -> None:
        """Report the operators of one step with their modelled times, whose sum is the modelled step time."""
        from featurize.timing.simulation import operator_costs
        from warehouse.tables.schema import KERNEL_PHASES  # imports pyarrow: no threads in the trial server
        from workers.devices.training import dims_text, report_rows

        priced = zip(trace.operators, operator_costs(trace, self.spec, config), strict=True)
        counts = Counter(
            (op.phase, op.name, op.input_shapes, op.dtype, cost.seconds * 1e6)
            for op, cost in priced
            if cost.seconds > 0
        )
        rows = [
            {
                "phase": phase if phase in KERNEL_PHASES else None,
                "operator": name,
                "dims": dims_text(shapes),
                "dtype": dtype,
                "duration_us": microseconds,
                "count": count,
                "steps": 1,
                "timing": "model",
            }
            for (phase, name, shapes, dtype, microseconds), count in counts.items()
        ]
        report_rows(rows, None, link)

    def _report_samples(
        self,
        step: SimulatedStep,
        shown: MemberAlone,
        warmup_s: float,
        window_s: float,
        link: Link,
        rank: Mapping[str, int],
    ) -> None:
        """Report a sample every 100 ms of virtual time. The model computes only means, so every sample is the mean.

        `step` has the trial's figures, `shown` those of the whole device with the partners.
        """
        steady = {
            "memory_used_mib": shown.memory_mib,
            "process_memory_mib": step.peak_memory_mib,
            "gpu_util": shown.gpu_util,
            "smact": shown.smact,
            "smocc": shown.smocc,
            "drama": shown.drama,
            "power_w": shown.power_w,
            "allocated_mib": step.peak_allocated_mib,
            "reserved_mib": step.peak_reserved_mib,
            "step_time_ms": step.step_time_ms,
        }
        for index in range(max(1, math.floor(window_s / _SAMPLE_PERIOD_S))):
            t_s = warmup_s + index * _SAMPLE_PERIOD_S
            link.report("sample", sensor="simulated", t_ns=round(t_s * 1e9), values=steady, **rank)


def alone_of(step: SimulatedStep) -> MemberAlone:
    """Return the device's figures for a step that runs alone."""
    busy = step.activity
    return MemberAlone(
        memory_mib=step.peak_memory_mib,
        gpu_util=busy.gpu_util,
        smact=busy.smact,
        smocc=busy.smocc,
        drama=busy.drama,
        power_w=busy.power_w,
    )


def beside(step: SimulatedStep, spec: DeviceSpec, together: Together) -> tuple[SimulatedStep, MemberAlone]:
    """Return a member's step beside its partners, and the device's figures for all of them.

    Members take memory in the order of their numbers. A member that does not get enough ends, and the others continue.
    Energy and power above idle scale with the speeds.

    Raises:
        SimulatedOutOfMemoryError: The remaining memory does not suffice for this member.
    """
    alone = alone_of(step)
    members = [alone if place == together.member else member for place, member in enumerate(together.alone)]
    staying: dict[int, MemberAlone] = {}
    used_mib = 0.0
    for place, member in enumerate(members):
        if member is None or used_mib + member.memory_mib > spec.memory_mib:
            if place == together.member:
                raise SimulatedOutOfMemoryError(
                    f"{spec.name} (simulated): the step needs {alone.memory_mib:.0f} MiB, and beside its partners "
                    f"{spec.memory_mib - used_mib:.0f} of {spec.memory_mib:.0f} MiB are left"
                )
            continue
        staying[place] = member
        used_mib += member.memory_mib
    loads = [GpuLoad(member.gpu_util, member.smact, member.drama) for member in staying.values()]
    speeds = dict(zip(staying, speeds_of_loads(loads, together.sharing), strict=True))

    def shared(figure: str) -> float:
        total: float = sum(getattr(member, figure) * speeds[place] for place, member in staying.items())
        return min(1.0, total)

    power_w = spec.idle_power_w + sum(
        (member.power_w - spec.idle_power_w) * speeds[place] for place, member in staying.items()
    )
    slower_ms = step.timed.step_time_ms / speeds[together.member]
    shown = MemberAlone(
        memory_mib=used_mib,
        gpu_util=shared("gpu_util"),
        smact=shared("smact"),
        smocc=shared("smocc"),
        drama=shared("drama"),
        power_w=min(power_w, spec.power_limit_w),
    )
    return replace(step, timed=replace(step.timed, step_time_ms=slower_ms)), shown


def _labels(step: SimulatedStep, steps: int, window_s: float) -> dict[str, float]:
    return {
        "peak_memory_mib": step.peak_memory_mib,
        "peak_reserved_mib": step.peak_reserved_mib,
        "peak_allocated_mib": step.peak_allocated_mib,
        "step_time_ms": step.step_time_ms,
        "steps": steps,
        "energy_j": step.activity.power_w * window_s,
    }


def _report_ranks(of_stage: int, traced: Mapping[int, SimulatedStep], steps: int, window_s: float, link: Link) -> None:
    """Report each rank's labels: those of the traced rank of its stage, because all ranks of a stage do the same."""
    for first, step in traced.items():
        waiting = {
            "exposed_ms": step.communication.exposed_ms,
            "communication_ms": step.communication.busy_ms,
            "sent_mib": sum(step.communication.sent_mib.values()),
        }
        for rank in range(first, first + of_stage):
            link.report("rank", rank=rank, values={**_labels(step, steps, window_s), **waiting})


def _replay_limited(
    trace: StepTrace, spec: DeviceSpec, config: TrialConfig, fraction: float | None
) -> MemoryProfile | None:
    """Replay with an allocator that may take only `fraction` of the device; return None without a limit."""
    if fraction is None:
        return None
    from featurize.memory.allocator import AllocatorSettings
    from featurize.memory.replay import replay

    settings = AllocatorSettings(per_process_memory_fraction=fraction)
    return replay(trace, spec, cudnn_benchmark=config.cudnn_benchmark, allocator=settings)


def _share(slot: Slot) -> str:
    return "" if slot.memory_fraction is None else f", and it may take {slot.memory_fraction:g} of that"


class SimulatedOutOfMemoryError(RuntimeError):
    """The modelled step does not fit the modelled device; the run is an `oom`, as on a real one."""
