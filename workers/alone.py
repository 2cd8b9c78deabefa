"""A trial's figures when it had the device to itself: what its figures beside others are held against."""

from __future__ import annotations

from dataclasses import dataclass

from warehouse.tables.run import Run


@dataclass(frozen=True, kw_only=True, slots=True)
class AloneRun:
    """Figures of one run; None where a figure was not measured. Ratios lie between 0 and 1."""

    run_id: str
    status: str
    step_ms: float | None = None
    memory_mib: float | None = None
    gpu_util: float | None = None
    smact: float | None = None
    smocc: float | None = None
    drama: float | None = None
    power_w: float | None = None

    @classmethod
    def of(cls, run: Run) -> AloneRun:
        """Return the figures of a finished run."""
        return cls(
            run_id=run.run_id,
            status=run.status,
            step_ms=run.step_time_ms,
            memory_mib=run.peak_memory_mib,
            gpu_util=run.gpu_util,
            smact=run.smact,
            smocc=run.smocc,
            drama=run.drama,
            power_w=run.power_w,
        )
