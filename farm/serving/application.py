"""The service's application: its routes, the answers of one process, and its problem documents.

Start reading at `make_application`; each route calls a method of `EstimationService`. `review_pod` is the admission
webhook for Kubernetes, which annotates a pod that names its job with an estimate.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import gc
import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from conf.errors import CommandError, UsageError, unknown_name
from conf.files.identity import version_of
from farm.serving.bodies import (
    MLP_EXAMPLE,
    AdmitAnswer,
    AdmitRequest,
    BatchAnswer,
    BatchRequest,
    ClientQuestion,
    DeviceFields,
    DevicesAnswer,
    EstimateAnswer,
    EstimateRequest,
    FitAnswer,
    FitRequest,
    Health,
    Pending,
    PlanAnswer,
    PlanRequest,
    Policy,
    ProblemDocument,
    config_at,
    device_at,
    estimate_question,
    fit_question,
    invalid_body,
    plan_question,
    request_at,
)
from farm.serving.explorer_pages import READERS, ExplorerPages, add_pages
from farm.serving.gate import (
    CALLER,
    PROBLEM_TYPE,
    Caller,
    Gate,
    Places,
    Problem,
    RequestLog,
    Scrubber,
    ServiceMetrics,
    busy,
    invalid,
    problem_response,
)
from farm.serving.scheduling import DEVICE, JOB, PREFIX, device_of, job_of_text, value_at
from farm.serving.settings import ServeSettings
from farm.serving.traces import DONE, FAILED, QuestionRow, RemoteQuestions, TraceStore
from featurize.configs.features import FEATURES_STAMP
from featurize.device.device_spec import describe_device, device_names
from learn.estimation.estimating import estimate, estimate_many
from learn.estimation.job_estimate import Estimate
from learn.sharing.admitting import GpuState, admit
from learn.sharing.slowdowns import JobProfile
from warehouse.files.folder import DataFolder

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_PROBLEM = {"model": ProblemDocument, "content": {PROBLEM_TYPE: {}}}
_REFUSALS: dict[int | str, dict[str, Any]] = {
    code: {**_PROBLEM, "description": text}
    for code, text in {
        400: "not JSON",
        401: "no valid token",
        403: "not allowed here",
        409: "not yet known",
        413: "too large",
        415: "not JSON",
        421: "another host",
        422: "a field is wrong, or the job cannot be estimated",
        429: "busy",
        503: "too slow",
    }.items()
}
_POLLED: dict[int | str, dict[str, Any]] = {
    202: {"model": Pending, "description": "being traced; GET the URL in `location`"},
    **_REFUSALS,
}


def make_application(settings: ServeSettings, questions: RemoteQuestions | None = None) -> Any:
    """Return the ASGI application of one process. questions: the store for traces; default the data folder's."""
    service = EstimationService(settings, questions)
    pages = ExplorerPages(DataFolder.resolve(settings.data), settings.limits, service.scrubber)

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        await service.warm_up()
        forgetting = asyncio.create_task(service.forget_regularly())
        yield
        forgetting.cancel()
        pages.close()
        service.close()
        service.questions.close()

    app = FastAPI(
        title="gpufarm",
        version="1",
        lifespan=lifespan,
        redoc_url=None,
        docs_url=None,
        summary="What a training job takes of a GPU, before it runs",
        description="Problems are RFC 9457 documents. `Prefer: wait=N` waits N seconds for a trace within the request.",
    )
    _add_routes(app, service)
    if settings.explorer:
        add_pages(app, pages)
    _add_problems(app)
    return Gate(app, settings, READERS - 1, service.working, service.log, service.metrics)


def _add_routes(app: FastAPI, service: EstimationService) -> None:
    @app.post("/v1/estimate", response_model=EstimateAnswer, responses=_POLLED, tags=["estimates"])
    async def estimate(body: EstimateRequest, request: Request) -> Response:
        """Estimate a job's memory, utilization and step time: 200 where it is known or traced in time, else 202."""
        return await service.estimate(body, request.scope[CALLER])

    @app.post("/v1/estimate:batch", response_model=BatchAnswer, responses=_REFUSALS, tags=["estimates"])
    async def estimate_batch(body: BatchRequest, request: Request) -> Response:
        """Estimate many jobs; each yields a result, a pending trace or a problem."""
        return await service.batch(body.jobs, request.scope[CALLER])

    @app.post("/v1/fit", response_model=FitAnswer, responses=_POLLED, tags=["estimates"])
    async def fit(body: FitRequest, request: Request) -> Response:
        """Return the GPU models that a job fits, or the largest batch that fits one."""
        return await service.traced(fit_question(body, service.policy), request.scope[CALLER])

    @app.post("/v1/admit", response_model=AdmitAnswer, responses=_REFUSALS, tags=["sharing"])
    async def admit(body: AdmitRequest, request: Request) -> Response:
        """Say whether a job may join the jobs of a GPU, with slowdowns and the risk of running out of memory."""
        return await service.admit(body, request.scope[CALLER])

    @app.post("/v1/plan", response_model=PlanAnswer, responses=_POLLED, tags=["several GPUs"])
    async def plan(body: PlanRequest, request: Request) -> Response:
        """Return which layouts of a job on several GPUs fit, the quickest first."""
        return await service.traced(plan_question(body, service.policy), request.scope[CALLER])

    @app.post("/v1/kubernetes/mutate", responses=_REFUSALS, tags=["schedulers"])
    async def mutate(body: dict[str, Any], request: Request) -> dict[str, Any]:
        """Answer a Kubernetes AdmissionReview of a pod with the annotation gpufarm.io/job."""
        return await service.review(body, request.scope[CALLER])  # type: ignore[return-value]

    polled = {404: {**_PROBLEM, "description": "no such question"}, **_POLLED}

    @app.get("/v1/estimates/{key}", response_model=EstimateAnswer, responses=polled, tags=["estimates"])
    async def estimate_of(key: str, request: Request) -> Response:
        """Return the estimate of a traced question, or 202 while it is traced."""
        return await service.answer_of("estimate", key, request.scope[CALLER])

    @app.get("/v1/fits/{key}", response_model=FitAnswer, responses=polled, tags=["estimates"])
    async def fit_of(key: str, request: Request) -> Response:
        """Return the fit of a traced question, or 202 while it is traced."""
        return await service.answer_of("fit", key, request.scope[CALLER])

    @app.get("/v1/plans/{key}", response_model=PlanAnswer, responses=polled, tags=["several GPUs"])
    async def plan_of(key: str, request: Request) -> Response:
        """Return the layouts of a traced question, or 202 while it is traced."""
        return await service.answer_of("plan", key, request.scope[CALLER])

    @app.get("/v1/devices", responses=_REFUSALS, tags=["devices"])
    async def devices() -> DevicesAnswer:
        """Return the GPU models that are described."""
        specs = sorted(map(describe_device, device_names()), key=lambda spec: (spec.memory_mib, spec.name))
        fields = [
            DeviceFields(name=spec.name, memory_mib=spec.memory_mib, vendor=spec.architecture.vendor) for spec in specs
        ]
        return DevicesAnswer(devices=fields)

    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """Answer as long as this process does."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": Health}}, tags=["operations"])
    async def readyz(response: Response) -> Health:
        """Return 503 until the models are loaded and the traces are alive."""
        age_s = await service.questions.pulse_age_s()
        health = Health(ready=service.warm and age_s is not None and age_s < _OLD_PULSE_S, trace_pool_age_s=age_s)
        response.status_code = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return health

    @app.get("/metrics", response_class=PlainTextResponse, tags=["operations"])
    async def metrics() -> Response:
        """Return metrics in Prometheus's text format."""
        text = service.metrics.text(await service.questions.counts(), await service.questions.pulse_age_s())
        return PlainTextResponse(text, headers={"content-type": _PROMETHEUS})


def _add_problems(app: FastAPI) -> None:
    def answered(request: Request, problem: Problem) -> Response:
        return problem_response(problem, request.scope["request_id"])

    @app.exception_handler(Problem)
    async def of_problem(request: Request, problem: Problem) -> Response:
        return answered(request, problem)

    @app.exception_handler(RequestValidationError)
    async def of_body(request: Request, error: RequestValidationError) -> Response:
        return answered(request, invalid_body(error.errors(), ""))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        name = {404: "not-found", 405: "method-not-allowed"}.get(error.status_code, "invalid-request")
        problem = Problem(error.status_code, name, str(error.detail), headers=dict(error.headers or {}))
        return answered(request, problem)

    @app.exception_handler(Exception)  # the gate logs its traceback
    async def of_failure(request: Request, _error: Exception) -> Response:
        detail = "The service failed on this request; its log has the reason."
        return answered(request, Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail))


_JSON = "application/json"
_LOOK_EVERY_S, _LOOK_SELDOM_S = 0.05, 0.5
_FORGET_EVERY_S = 10.0
_MODELS_EVERY_S = 10.0  # between looks for refitted models
_LARGEST_QUESTION = 320 * 1024  # characters of JSON: questions are stored
_TOGETHER = 32  # jobs of a batch at a time: other requests get turns in between
_CONFIG_WAIT_S = 5.0  # most trial configs are traced in this time; without `Prefer`, a request waits this long
_REVIEW_WAIT_S = 1.0  # of the two seconds that Kubernetes allows the webhook
_OLD_PULSE_S = 10.0


class EstimationService:
    """One process's part of the service. questions: the store for traces; default the data folder's.

    A request holds a place of `working`, or of `waiting` while it waits for a trace.
    """

    def __init__(self, settings: ServeSettings, questions: RemoteQuestions | None = None) -> None:
        folder = DataFolder.resolve(settings.data)
        self.settings = settings
        self.scrubber = Scrubber(folder.root)
        self.log = RequestLog(settings.log)
        self.questions = questions or TraceStore(folder.service, settings)
        self.metrics = ServiceMetrics()
        self.data = str(folder.root)
        self._thread = ThreadPoolExecutor(1, "estimates")
        self.policy = Policy(settings.trust, settings.scripts)
        self.working, self.waiting = Places(settings.limits.concurrent), Places(settings.limits.concurrent)
        self._models = folder.models
        self._models_read_at = float("-inf")
        self._state = ""  # what answers depend on beside the question
        self.warm = False

    async def estimate(self, request: EstimateRequest, caller: Caller) -> Response:
        """Return 200 with the estimate, or 202 with its future URL. Raises `Problem`."""
        question = estimate_question(request, self.policy)
        if question.fast:
            return _json(await self._fast(question))
        if caller.wait_s is None and question.config is not None:
            caller = replace(caller, wait_s=_CONFIG_WAIT_S)
        return await self.traced(question, caller)

    async def batch(self, jobs: list[dict[str, Any]], caller: Caller) -> Response:
        """Return one result for each job. Works on a few at a time, so other requests get turns."""
        if len(jobs) > self.settings.limits.batch:
            raise invalid(f"a batch has at most {self.settings.limits.batch:,} jobs, got {len(jobs):,}", "/jobs")
        results: list[dict[str, Any]] = []
        more_places = min(len(jobs), _TOGETHER, max(1, self.working.limit // 4)) - 1
        if not self.working.take(caller.client, more_places):
            raise busy("Your share of the work in progress is used up; try again in a second.")
        try:
            for start in range(0, len(jobs), _TOGETHER):
                turn = enumerate(jobs[start : start + _TOGETHER], start)
                results += await asyncio.gather(*(self._of_batch(job, place, caller) for place, job in turn))
        finally:
            self.working.give_back(caller.client, more_places)
        return _json({"results": results})

    async def admit(self, request: AdmitRequest, caller: Caller) -> Response:
        """Return whether the job may join. Raises `Problem`, also if a job's trace is not done in time."""
        device = device_at(request.gpu.device, "/gpu/device")
        given = [request.job, *request.gpu.jobs]
        questions = []
        for job, pointer in zip(
            given, ["/job", *(f"/gpu/jobs/{place}" for place in range(len(given) - 1))], strict=True
        ):
            if job.config is not None:
                config_at(job.config, f"{pointer}/config", self.policy.trust)
                asked = EstimateRequest.model_validate({"config": job.config, "device": device.name})
                questions.append(estimate_question(asked, self.policy))
        if caller.wait_s is None:
            caller = replace(caller, wait_s=_CONFIG_WAIT_S)
        known = iter(await self._known(questions, caller))
        jobs = [next(known) if job.figures is None else JobProfile(**job.figures.model_dump()) for job in given]
        gpu = GpuState(
            device=device.name,
            memory_mib=request.gpu.memory_mib or device.memory_mib,
            used_mib=request.gpu.used_mib,
            jobs=tuple(jobs[1:]),
        )
        answer = await self._in_thread(
            lambda: admit(
                jobs[0], gpu, data=self.data, risk=request.risk, max_slowdown=request.max_slowdown
            ).to_mapping()
        )
        return _json(self.scrubber.values(answer))

    async def review(self, review: dict[str, Any], caller: Caller) -> Response:
        """Return the answer to a Kubernetes admission review: always allowed, with any estimate of the pod's job.

        Any client may send one, so scripts and models of trusted modules are refused.
        """

        async def answer(request: EstimateRequest) -> Estimate:
            (state,) = await self._known([estimate_question(request, Policy())], replace(caller, wait_s=_REVIEW_WAIT_S))
            return state

        return _json(await review_pod(review, answer))

    async def _known(self, questions: Sequence[ClientQuestion], caller: Caller) -> list[Estimate]:
        """Return the estimates of jobs that were traced, or are traced in time. Raises `Problem`."""
        rows = [await self._ask(question, caller) for question in questions]
        ends = time.monotonic() + (caller.wait_s or 0.0)
        estimates = []
        for asked in rows:
            row = await self._wait_for_row(asked, replace(caller, wait_s=max(ends - time.monotonic(), 0.0)))
            answer = _answer_of("estimate", row)
            if not row.is_finished:
                detail = "The job is not yet known: it is being traced. Ask again in a second."
                raise Problem(HTTPStatus.CONFLICT, "not-yet-known", detail, headers={"retry-after": "1"})
            estimates.append(Estimate.from_mapping(answer["estimate"]))
        return estimates

    async def answer_of(self, kind: str, key: str, caller: Caller) -> Response:
        """Return a traced question's answer, or 202. Raises `Problem`."""
        row = await self.questions.get(key)
        if row is None:
            raise Problem(HTTPStatus.NOT_FOUND, "not-found", "No question has this id; it may have expired.")
        if row.is_finished:
            self.metrics.answered("trace")
        return await self._respond(kind, row, caller)

    async def warm_up(self) -> None:
        """Load the models that answer without a trace, so the first request does not wait for them."""
        await self._in_thread(lambda: estimate_many([MLP_EXAMPLE], method="fast", data=self.data))
        gc.collect()
        gc.freeze()  # a full collection over torch's objects stops a process for 100 ms
        self.warm = True

    async def forget_regularly(self) -> None:
        """Keep the questions for traces within their bounds, until it is cancelled."""
        while True:
            await asyncio.sleep(_FORGET_EVERY_S)
            try:
                await self.questions.forget()
            except Exception as error:  # a full disk, or a deployment of Ray Serve that is restarted
                self.log.event("forget", problem=str(error))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _fast(self, question: ClientQuestion) -> dict[str, Any]:
        config = question.config
        assert config is not None
        answer = await self._in_thread(
            lambda: estimate(config, method="fast", data=self.data, **question.options).to_mapping()
        )
        self.metrics.answered("fast")
        return {
            "id": self._key(question),
            "status": "done",
            "method": "fast",
            "estimate": self.scrubber.values(answer),
        }

    def _key(self, question: ClientQuestion) -> str:
        """Return the question's id, another one whenever answers may change: with the code, and with fitted models."""
        if time.monotonic() - self._models_read_at > _MODELS_EVERY_S:
            self._models_read_at = time.monotonic()
            fitted: list[str] = []
            with contextlib.suppress(OSError):  # a target's folder is deleted meanwhile
                fitted = [f"{path.parent.name}/{path.name}" for path in sorted(self._models.glob("*/*"))]
            self._state = "\n".join([version_of("gpufarm") or "unknown", FEATURES_STAMP, *fitted])
        return question.key(self._state)

    async def _of_batch(self, job: dict[str, Any], place: int, caller: Caller) -> dict[str, Any]:
        try:
            question = estimate_question(request_at(job, f"/jobs/{place}"), self.policy)
            if question.fast:
                return await self._fast(question)
            return _answer_of("estimate", await self._ask(question, caller))
        except Problem as problem:
            return problem.document()

    async def _ask(self, question: ClientQuestion, caller: Caller) -> QuestionRow:
        if len(question.text) > _LARGEST_QUESTION:
            detail = f"A question for a trace has at most {_LARGEST_QUESTION // 1024} KiB of JSON."
            raise Problem(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "body-too-large", detail)
        row = await self.questions.ask(self._key(question), question.text, caller.client)
        if row is None:
            raise busy("Your share of the questions that wait for a trace is used up; try again later.", 30)
        if row.is_finished:
            self.metrics.answered("cache")
        return row

    async def traced(self, question: ClientQuestion, caller: Caller) -> Response:
        """Return a question's answer, or its future URL. Raises `Problem`."""
        return await self._respond(question.kind, await self._ask(question, caller), caller)

    async def _wait_for_row(self, row: QuestionRow, caller: Caller) -> QuestionRow:
        """Return the row once it is finished or the caller's time is up; now if the caller has too many waiting."""
        client = caller.client
        if row.is_finished or not caller.wait_s or not self.waiting.take(client):
            return row
        self.working.give_back(client)
        began = time.monotonic()
        try:
            while not row.is_finished and (waited_s := time.monotonic() - began) < caller.wait_s:
                await asyncio.sleep(min(max(_LOOK_EVERY_S, waited_s / 10), _LOOK_SELDOM_S))
                current = await self.questions.get(row.key)
                if current is None:
                    return row  # it was forgotten meanwhile
                row = current
            if row.is_finished:
                self.metrics.answered("trace")
            return row
        finally:
            self.waiting.give_back(client)
            self.working.hold(client)  # even over the share; the gate gives it back

    async def _respond(self, kind: str, row: QuestionRow, caller: Caller) -> Response:
        """Return the answer, or its future URL. Raises `Problem`."""
        row = await self._wait_for_row(row, caller)
        answer = _answer_of(kind, row)
        if row.is_finished:
            return _json(answer)
        return _json(answer, HTTPStatus.ACCEPTED, headers={"location": answer["url"], "retry-after": "1"})

    async def _in_thread(self, work: Any) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except CommandError as error:
            raise invalid(self.scrubber.text(str(error)), "") from error
        except (ArithmeticError, ValueError) as error:
            raise invalid("the job's sizes are too large to compute with", "") from error


def _answer_of(kind: str, row: QuestionRow) -> dict[str, Any]:
    """Return a question's answer, or its future URL while it waits for its trace. Raises `Problem` if it failed."""
    if row.state == FAILED:
        raise Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "not-answerable", row.problem or "the trace failed")
    if row.state == DONE:
        return {"id": row.key, "status": "done", "method": "full", kind: row.answer}
    return {"id": row.key, "status": row.state, "url": f"/v1/{kind}s/{row.key}", "retry_after_s": 1.0}


def _json(value: Any, status: HTTPStatus = HTTPStatus.OK, headers: dict[str, str] | None = None) -> Response:
    return Response(json.dumps(value).encode(), int(status), headers, _JSON)


_WRITE = f"{PREFIX}write"
# How schedulers that share GPUs spell memory: an annotation of the pod, or a limit of its container.
_KAI, _HAMI, _KOORDINATOR = _DIALECTS = ("kai", "hami", "koordinator")
_KAI_MEMORY, _HAMI_MEMORY, _KOORDINATOR_MEMORY = "gpu-memory", "nvidia.com/gpumem", "koordinator.sh/gpu-memory"
_GPU_LIMITS = ("nvidia.com/gpu", "koordinator.sh/gpu", "koordinator.sh/gpu-core", "koordinator.sh/gpu-shared")
_API_VERSION = "admission.k8s.io/v1"
_LONGEST_NOTE = 250  # characters of a problem

EstimateOf = Callable[[EstimateRequest], Awaitable[Estimate]]
_Patch = list[dict[str, Any]]


async def review_pod(asked: Mapping[str, Any], answer: EstimateOf) -> dict[str, Any]:
    """Return the AdmissionReview that answers `asked`.

    A pod is always allowed, and every problem becomes an annotation: an estimate must not keep a pod from starting. So
    does a job that is not known in time; `farm.kueue` waits for its trace.

    Args:
        asked: The API server's review of a pod.
        answer: Returns the estimate of a request if it is known; raises `Problem`.

    Raises:
        Problem: It is not an AdmissionReview of version v1.
    """
    request = asked.get("request")
    if asked.get("apiVersion") != _API_VERSION or not isinstance(request, Mapping) or "uid" not in request:
        raise Problem(422, "invalid-request", f"an AdmissionReview of {_API_VERSION} is wanted", (("/apiVersion", ""),))
    response: dict[str, Any] = {"uid": str(request["uid"]), "allowed": True}
    pod = request.get("object")
    if isinstance(pod, Mapping) and pod.get("kind") == "Pod" and (patch := await _patch_of(pod, answer)):
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(json.dumps(patch).encode()).decode()
    return {"apiVersion": _API_VERSION, "kind": "AdmissionReview", "response": response}


async def _patch_of(pod: Mapping[str, Any], answer: EstimateOf) -> _Patch:
    annotations = value_at(pod, "metadata.annotations", dict)
    text = annotations.get(JOB)
    if not isinstance(text, str):
        return []
    try:
        dialect = annotations.get(_WRITE)
        if dialect is not None and dialect not in _DIALECTS:
            raise unknown_name(_WRITE, dialect, _DIALECTS)
        estimate = await answer(request_at({"device": device_of(pod), **job_of_text(text, JOB)}, JOB))
    except (UsageError, Problem) as error:
        detail = error.detail if isinstance(error, Problem) else str(error)
        return _annotation_patch(annotations, {f"{PREFIX}problem": detail[:_LONGEST_NOTE]})
    fits = "unknown" if estimate.fits_device is None else str(estimate.fits_device).lower()
    needed = math.ceil(estimate.needed_mib)
    notes = {
        f"{PREFIX}peak-memory-mib": str(math.ceil(estimate.peak_memory_mib)),
        f"{PREFIX}upper-mib": str(needed),
        f"{PREFIX}fits": fits,
        DEVICE: estimate.device,
    }
    if dialect == _KAI and _KAI_MEMORY not in annotations:
        notes[_KAI_MEMORY] = str(needed)
    patch = _annotation_patch(annotations, notes)
    if dialect in (_HAMI, _KOORDINATOR):
        patch += _limit(pod, dialect, needed)
    return patch


def _annotation_patch(present: Mapping[str, Any], notes: Mapping[str, str]) -> _Patch:
    """Return the patch that sets annotations, replacing those copied from another pod."""
    if not present:
        return [{"op": "add", "path": "/metadata/annotations", "value": dict(notes)}]
    return [{"op": "add", "path": f"/metadata/annotations/{_escape(name)}", "value": notes[name]} for name in notes]


def _limit(pod: Mapping[str, Any], dialect: str, needed: int) -> _Patch:
    """Return the patch that limits the memory of containers that request a GPU and set no limit."""
    name = _HAMI_MEMORY if dialect == _HAMI else _KOORDINATOR_MEMORY
    value = str(needed) if dialect == _HAMI else f"{needed}Mi"
    patch: _Patch = []
    for place, container in enumerate(value_at(pod, "spec.containers", list)):
        limits = value_at(container, "resources.limits", dict)
        if name in limits or not any(gpu in limits for gpu in _GPU_LIMITS):
            continue
        base = f"/spec/containers/{place}/resources"
        patch.append({"op": "add", "path": f"{base}/limits/{_escape(name)}", "value": value})
        if dialect == _KOORDINATOR and isinstance(value_at(container, "resources", dict).get("requests"), dict):
            patch.append({"op": "add", "path": f"{base}/requests/{_escape(name)}", "value": value})
    return patch


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
