"""Answers of one process of the service, and its questions to the traces. Start reading at `EstimationService`."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any

from fastapi import Request, Response
from pydantic import TypeAdapter, ValidationError

from conf.errors import CommandError
from farm.serving import answers, requests
from farm.serving.gate import CLIENT, wait_asked
from farm.serving.kubernetes import reviewed
from farm.serving.problems import Problem, Scrubber, busy, invalid
from farm.serving.question_access import LocalQuestions
from farm.serving.questions import (
    ClientQuestion,
    Policy,
    ServiceState,
    config_at,
    device_at,
    estimate_question,
    fit_question,
    plan_question,
)
from farm.serving.request_log import RequestLog
from farm.serving.service_metrics import ServiceMetrics
from farm.serving.settings import ServeSettings
from farm.serving.shares import Places
from farm.serving.trace_store import DONE, FAILED, QuestionLimits, Traced, TraceStore
from learn.estimation.job_estimate import Estimate
from warehouse.files.folder import DataFolder

_JSON = "application/json"
_LOOK_EVERY_S, _LOOK_SELDOM_S = 0.05, 0.5
_FORGET_EVERY_S = 10.0
_LARGEST_QUESTION = 320 * 1024  # characters of JSON: questions are stored
_TOGETHER = 32  # jobs of a batch at a time: others have their turns in between
_CONFIG_WAIT_S = 5.0  # in which most trial configs are traced: without `Prefer`, a request waits so long for one
_REVIEW_WAIT_S = 1.0  # of the two seconds that Kubernetes gives the webhook
_OLD_PULSE_S = 10.0


@dataclass(frozen=True)
class Caller:
    """Who asks, and how long the request may wait for a trace; None: it does not say."""

    client: str
    wait_s: float | None


class EstimationService:
    """One process's share of the service. questions: those for traces; default the data folder's own.

    A request holds a place of `working`, or of `waiting` while it waits for a trace.
    """

    def __init__(self, settings: ServeSettings, questions: LocalQuestions | None = None) -> None:
        folder = DataFolder.resolve(settings.data)
        self.settings = settings
        self.scrubber = Scrubber(folder.root)
        self.log = RequestLog(settings.log)
        self.questions = questions or LocalQuestions(TraceStore(folder.service))
        self.metrics = ServiceMetrics()
        self.data = str(folder.root)
        self._thread = ThreadPoolExecutor(1, "estimates")
        self.policy = Policy(settings.trust, settings.scripts)
        limits = settings.limits
        self.working, self.waiting = Places(limits.concurrent), Places(limits.concurrent)
        self._question_limits = QuestionLimits(limits.queued, 2**20 * limits.stored_mib, settings.cache_s)
        self._state = ServiceState(folder)
        self.warm = False

    def caller(self, request: Request) -> Caller:
        """Return who asks, as the gate has it."""
        wait_s = wait_asked(request.headers.get("prefer", ""), self.settings.limits.wait_s)
        return Caller(request.scope[CLIENT], wait_s)

    async def estimate(self, request: requests.EstimateRequest, caller: Caller) -> Response:
        """Return 200 with the estimate, or 202 with where it will be. Raises `Problem`."""
        question = estimate_question(request, self.policy)
        if question.fast:
            return _json(await self._fast(question))
        if caller.wait_s is None and question.config is not None:
            caller = replace(caller, wait_s=_CONFIG_WAIT_S)
        return await self._traced(question, caller)

    async def batch(self, jobs: list[dict[str, Any]], caller: Caller) -> Response:
        """Return one result for each job. Works on few at a time: others have their turns in between."""
        if len(jobs) > self.settings.limits.batch:
            raise invalid(f"a batch has at most {self.settings.limits.batch:,} jobs, got {len(jobs):,}", "/jobs")
        results: list[dict[str, Any]] = []
        with self._places(caller, min(len(jobs), _TOGETHER)):
            for start in range(0, len(jobs), _TOGETHER):
                turn = enumerate(jobs[start : start + _TOGETHER], start)
                results += await asyncio.gather(*(self._of_batch(job, place, caller) for place, job in turn))
        return _json({"results": results})

    async def fit(self, request: requests.FitRequest, caller: Caller) -> Response:
        """Return what fits, or where it will be. Raises `Problem`."""
        return await self._traced(fit_question(request, self.policy), caller)

    async def plan(self, request: requests.PlanRequest, caller: Caller) -> Response:
        """Return the layouts, or where they will be. Raises `Problem`."""
        return await self._traced(plan_question(request, self.policy), caller)

    async def admit(self, request: requests.AdmitRequest, caller: Caller) -> Response:
        """Return whether the job may join. Raises `Problem`, also for a job whose trace takes its time."""
        from learn.sharing.admitting import GpuState, admit
        from learn.sharing.profile import JobProfile

        device = device_at(request.gpu.device, "/gpu/device")
        given = [request.job, *request.gpu.jobs]
        questions = []
        for job, pointer in zip(given, ["/job", *(f"/gpu/jobs/{at}" for at in range(len(given) - 1))], strict=True):
            if job.config is not None:
                config_at(job.config, f"{pointer}/config", self.policy.trust)
                asked = requests.EstimateRequest.model_validate({"config": job.config, "device": device.name})
                questions.append(estimate_question(asked, self.policy))
        wait_s = _CONFIG_WAIT_S if caller.wait_s is None else caller.wait_s
        known = iter(await self._known(questions, replace(caller, wait_s=wait_s)))
        jobs = [next(known) if job.figures is None else JobProfile(**job.figures.model_dump()) for job in given]
        memory_mib = request.gpu.memory_mib or device.memory_mib
        gpu = GpuState(device=device.name, memory_mib=memory_mib, used_mib=request.gpu.used_mib, jobs=tuple(jobs[1:]))
        risk, most = request.risk, request.max_slowdown
        answer = await self._in_thread(
            lambda: admit(jobs[0], gpu, data=self.data, risk=risk, max_slowdown=most).to_mapping()
        )
        return _json(self.scrubber.values(answer))

    async def review(self, review: dict[str, Any], caller: Caller) -> Response:
        """Return the answer to a Kubernetes admission review: always allowed, with what is known of the pod's job.

        Whoever reaches the service may ask this, so that neither scripts nor models of trusted modules are taken.
        """

        async def answer(request: requests.EstimateRequest) -> Estimate:
            (done,) = await self._known([estimate_question(request, Policy())], replace(caller, wait_s=_REVIEW_WAIT_S))
            return done

        return _json(await reviewed(review, answer))

    async def _known(self, questions: Sequence[ClientQuestion], caller: Caller) -> list[Estimate]:
        """Return the estimates of jobs that were traced, or are traced in time. Raises `Problem`."""
        rows = [await self._ask(question, caller) for question in questions]
        ends = time.monotonic() + (caller.wait_s or 0.0)
        estimates = []
        for asked in rows:
            row = await self._settled(asked, replace(caller, wait_s=max(ends - time.monotonic(), 0.0)))
            if row.state == FAILED:
                raise _failed(row)
            if row.answer is None:
                detail = "The job is not yet known: it is being traced. Ask again in a second."
                raise Problem(HTTPStatus.CONFLICT, "not-yet-known", detail, headers={"retry-after": "1"})
            estimates.append(Estimate.from_mapping(row.answer))
        return estimates

    async def answer_of(self, kind: str, key: str, caller: Caller) -> Response:
        """Return a traced question's answer, or 202. Raises `Problem`."""
        row = await self.questions.get(key)
        if row is None:
            raise Problem(HTTPStatus.NOT_FOUND, "not-found", "There is no question of this id, or it was long ago.")
        return await self._waited(kind, row, caller)

    async def health(self) -> answers.Health:
        """Return whether this process can answer all that it takes."""
        age = await self.questions.pulse_age_s()
        traces = age is not None and age < _OLD_PULSE_S
        return answers.Health(ready=self.warm and traces, trace_pool_age_s=age)

    async def metrics_text(self) -> bytes:
        """Return the metrics in Prometheus's text format."""
        return self.metrics.text(await self.questions.counts(), await self.questions.pulse_age_s())

    async def warm_up(self) -> None:
        """Load what answers without a trace, so that the first request does not wait for it."""
        await self._in_thread(self._load)
        gc.collect()
        gc.freeze()  # a full collection over all that torch imports stops a process for 100 ms
        self.warm = True

    async def forget_regularly(self) -> None:
        """Keep the questions for traces within their bounds, until it is cancelled."""
        while True:
            await asyncio.sleep(_FORGET_EVERY_S)
            try:
                await self.questions.forget(self._question_limits)
            except Exception as error:  # a full disk, or a deployment of Ray Serve that is started anew
                self.log.event("forget", problem=str(error))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _load(self) -> None:
        from learn.estimation.estimating import estimate_many
        from learn.sharing import admitting  # noqa: F401

        estimate_many([requests.MLP_EXAMPLE], method="fast", data=self.data)

    @contextmanager
    def _places(self, caller: Caller, jobs: int) -> Iterator[None]:
        """Hold a place for each job that a request works on at the same time; it has one. Raises `Problem`."""
        more = min(jobs, max(1, self.working.limit // 4)) - 1
        if not self.working.take(caller.client, more):
            raise busy("Your share of the work in progress is used up; try again in a second.")
        try:
            yield
        finally:
            self.working.give_back(caller.client, more)

    async def _fast(self, question: ClientQuestion) -> dict[str, Any]:
        from learn.estimation.estimating import estimate

        values, config = question.values, question.config
        assert config is not None
        done = await self._in_thread(
            lambda: estimate(
                config, device=values["device"], machine=values["machine"], data=self.data, method="fast"
            ).to_mapping()
        )
        self.metrics.answered("fast")
        key = question.key(self._state.text)
        return {"id": key, "status": "done", "method": "fast", "estimate": self.scrubber.values(done)}

    async def _of_batch(self, job: dict[str, Any], place: int, caller: Caller) -> dict[str, Any]:
        try:
            try:
                request = _BODY.validate_python(job)
            except ValidationError as error:
                raise invalid_body(error.errors(include_url=False), f"/jobs/{place}") from error
            question = estimate_question(request, self.policy)
            if question.fast:
                return await self._fast(question)
            row = await self._ask(question, caller)
            if row.state == FAILED:
                raise _failed(row)
            return _done("estimate", row) if row.state == DONE else _pending("estimate", row)
        except Problem as problem:
            return problem.document()

    async def _ask(self, question: ClientQuestion, caller: Caller) -> Traced:
        if len(question.text) > _LARGEST_QUESTION:
            detail = f"A question for a trace has at most {_LARGEST_QUESTION // 1024} KiB of JSON."
            raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body-too-large", detail)
        key = question.key(self._state.text)
        row = await self.questions.ask(key, question.text, caller.client, self._question_limits)
        if row is None:
            raise busy("Your share of the questions that wait for a trace is used up; try again later.", 30)
        if row.is_over:
            self.metrics.answered("cache")
        return row

    async def _traced(self, question: ClientQuestion, caller: Caller) -> Response:
        return await self._waited(question.kind, await self._ask(question, caller), caller)

    async def _settled(self, row: Traced, caller: Caller) -> Traced:
        """Return the row when it is over, or when the caller's time is; at once beyond its share of those who wait."""
        client = caller.client
        if row.is_over or not caller.wait_s or not self.waiting.take(client):
            return row
        self.working.give_back(client)
        try:
            return await self._over(row, caller.wait_s)
        finally:
            self.waiting.give_back(client)
            self.working.hold(client)  # the gate gives it back

    async def _waited(self, kind: str, row: Traced, caller: Caller) -> Response:
        """Return the answer, or where it will be."""
        row = await self._settled(row, caller)
        if row.state == FAILED:
            raise _failed(row)
        if row.state == DONE:
            return _json(_done(kind, row))
        pending = _pending(kind, row)
        headers = {"location": pending["url"], "retry-after": "1"}
        return _json(pending, HTTPStatus.ACCEPTED, headers)

    async def _over(self, row: Traced, wait_s: float) -> Traced:
        """Return the row when it is over, or as it is after the time."""
        began = time.monotonic()
        current: Traced | None = row
        while current is not None and not current.is_over and (waited_s := time.monotonic() - began) < wait_s:
            row = current
            await asyncio.sleep(min(max(_LOOK_EVERY_S, waited_s / 10), _LOOK_SELDOM_S))
            current = await self.questions.get(row.key)
        return current or row

    async def _in_thread(self, work: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except CommandError as error:
            raise invalid(self.scrubber.text(str(error)), "") from error
        except (ArithmeticError, ValueError) as error:
            raise invalid("the job's sizes are beyond what can be counted", "") from error


_BODY: TypeAdapter[requests.EstimateRequest] = TypeAdapter(requests.EstimateRequest)


def invalid_body(errors: Any, prefix: str) -> Problem:
    """Return the problem of a body that the schema refuses, each field by its JSON Pointer."""
    fields = []
    for error in errors:
        if error["type"] == "json_invalid":
            return Problem(HTTPStatus.BAD_REQUEST, "invalid-request", "The body is not valid JSON.")
        path = [str(part).replace("~", "~0").replace("/", "~1") for part in error["loc"] if part != "body"]
        fields.append((f"{prefix}{''.join(f'/{part}' for part in path)}", error["msg"].removeprefix("Value error, ")))
    detail = "; ".join(f"{pointer or 'the body'}: {text}" for pointer, text in fields[:5])
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, tuple(fields))


def _failed(row: Traced) -> Problem:
    detail = row.problem or "the trace failed"
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "not-answerable", detail)


def _done(kind: str, row: Traced) -> dict[str, Any]:
    return {"id": row.key, "status": "done", "method": "full", kind: row.answer}


def _pending(kind: str, row: Traced) -> dict[str, Any]:
    return {"id": row.key, "status": row.state, "url": f"/v1/{kind}s/{row.key}", "retry_after_s": 1.0}


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value).encode(), int(status), headers, _JSON)
