"""The service's answers: their bodies, typed. Start reading at `EstimateAnswer`."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, Field


class NoteFields(BaseModel):
    """A remark on an estimate. `code` stays the same where `text` is reworded."""

    code: str
    severity: Literal["problem", "warning", "info"]
    text: str
    targets: list[str] = Field(description="the targets of the figures that it is on; empty: of the whole estimate")


class EstimateFields(BaseModel):
    """The figures of one job on one GPU model; `learn.Estimate` describes them all. null: not known."""

    model_config = {"extra": "allow"}

    peak_memory_mib: float
    upper_mib: float | None = Field(description="what a share `coverage` of jobs stay below")
    bound_held_out: dict[str, float | str] = Field(
        description="the `share` of left-out rows that the bound held, how many `rows` there were, and in how many "
        "`groups` of which `kind`; empty: unchecked"
    )
    fits: bool | None = Field(description="whether the job fits into the empty card, by the bound where there is one")
    smact: float | None
    smocc: float | None
    drama: float | None
    step_time_ms: float | None
    device: str
    device_memory_mib: float | None
    warnings: list[str] = Field(description="the texts of `notes`")
    notes: list[NoteFields]
    answered_by: dict[str, str]


class EstimateAnswer(BaseModel):
    """An estimate."""

    id: str
    status: Literal["done"]
    method: Literal["fast", "full"]
    estimate: EstimateFields


class Pending(BaseModel):
    """A question that waits for its trace; GET its `url` for the answer."""

    id: str
    status: Literal["queued", "running"]
    url: str
    retry_after_s: float


class ProblemDocument(BaseModel):
    """A problem (RFC 9457); `errors` names the fields."""

    type: str
    title: str
    status: int
    detail: str
    instance: str | None = None
    errors: list[FieldError] | None = None


class FieldError(BaseModel):
    """pointer: JSON Pointer of the field in the request's body."""

    pointer: str
    detail: str


class FitAnswer(BaseModel):
    """Devices or batches that fit, as `learn.devices_that_fit` and `learn.largest_batch` have it."""

    id: str
    status: Literal["done"]
    method: Literal["full"]
    fit: dict[str, Any]


class PlanAnswer(BaseModel):
    """Layouts on several GPUs, the quickest first, as `learn.plan` has them."""

    id: str
    status: Literal["done"]
    method: Literal["full"]
    plan: dict[str, Any]


class SlowdownFields(BaseModel):
    """Slowdowns of one job; null: a utilization is not known."""

    name: str
    median: float | None
    p90: float | None


class AdmitAnswer(BaseModel):
    """The answer to whether a job may join, and why; `learn.admit` describes the figures."""

    admitted: bool
    why: str
    slowdowns: list[SlowdownFields]
    risk: float
    coverage: float
    bound_mib: float
    memory_mib: float


class BatchAnswer(BaseModel):
    """One result for each job, in order."""

    results: list[EstimateAnswer | Pending | ProblemDocument]


class DeviceFields(BaseModel):
    """A GPU model."""

    name: str
    memory_mib: float
    vendor: str


class DevicesAnswer(BaseModel):
    """The GPU models that are described."""

    devices: list[DeviceFields]


class Health(BaseModel):
    """The health of one process of the service."""

    ready: bool
    trace_pool_age_s: float | None
