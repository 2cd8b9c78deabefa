"""The service's application: its routes, and how what goes wrong is answered. Start reading at `make_application`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from conf.errors import EnvironmentProblem
from farm.serving import answers, requests
from farm.serving.estimation_service import EstimationService, invalid_body
from farm.serving.explorer_pages import READERS, ExplorerPages, add_pages
from farm.serving.gate import Gate, GateRules
from farm.serving.problems import PROBLEM_TYPE, Problem
from farm.serving.question_access import LocalQuestions
from farm.serving.settings import ServeSettings
from warehouse.files.folder import DataFolder

_PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
_PROBLEM = {"model": answers.ProblemDocument, "content": {PROBLEM_TYPE: {}}}
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
    202: {"model": answers.Pending, "description": "being traced; GET the URL in `location`"},
    **_REFUSALS,
}


def make_application(settings: ServeSettings, questions: LocalQuestions | None = None) -> Any:
    """Return the ASGI application of one process. questions: those for traces; default the data folder's own."""
    service = EstimationService(settings, questions)
    pages = ExplorerPages(DataFolder.resolve(settings.data), settings.limits, service.scrubber)

    @asynccontextmanager
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
    limits = settings.limits
    hosts = {"localhost", "127.0.0.1", "[::1]", settings.host.lower()} if not settings.tokens else set()
    rules = GateRules(
        settings.tokens,
        frozenset(hosts),
        1024 * limits.body_kib,
        limits.inline_s,
        limits.wait_s,
        READERS - 1,
        settings.open_metrics,
    )
    return Gate(app, rules, service.working, service.log, service.metrics)


def _add_routes(app: FastAPI, service: EstimationService) -> None:
    @app.post("/v1/estimate", response_model=answers.EstimateAnswer, responses=_POLLED, tags=["estimates"])
    async def estimate(body: requests.EstimateRequest, request: Request) -> Response:
        """Estimate a job's memory, utilization and step time: 200 where it is known or traced in time, else 202."""
        return await service.estimate(body, service.caller(request))

    @app.post("/v1/estimate:batch", response_model=answers.BatchAnswer, responses=_REFUSALS, tags=["estimates"])
    async def estimate_batch(body: requests.BatchRequest, request: Request) -> Response:
        """Estimate many jobs; each has a result, a pending trace or a problem of its own."""
        return await service.batch(body.jobs, service.caller(request))

    @app.post("/v1/fit", response_model=answers.FitAnswer, responses=_POLLED, tags=["estimates"])
    async def fit(body: requests.FitRequest, request: Request) -> Response:
        """Return the GPU models that a job fits, or the largest batch that fits one."""
        return await service.fit(body, service.caller(request))

    @app.post("/v1/admit", response_model=answers.AdmitAnswer, responses=_REFUSALS, tags=["sharing"])
    async def admit(body: requests.AdmitRequest, request: Request) -> Response:
        """Say whether a job may join the jobs of a GPU, with slowdowns and the risk of running out of memory."""
        return await service.admit(body, service.caller(request))

    @app.post("/v1/plan", response_model=answers.PlanAnswer, responses=_POLLED, tags=["several GPUs"])
    async def plan(body: requests.PlanRequest, request: Request) -> Response:
        """Return which layouts of a job on several GPUs fit, the quickest first."""
        return await service.plan(body, service.caller(request))

    @app.post("/v1/kubernetes/mutate", responses=_REFUSALS, tags=["schedulers"])
    async def mutate(body: dict[str, Any], request: Request) -> dict[str, Any]:
        """Answer a Kubernetes AdmissionReview of a pod with the annotation gpufarm.io/job."""
        return await service.review(body, service.caller(request))  # type: ignore[return-value]

    polled = {404: {**_PROBLEM, "description": "no such question"}, **_POLLED}

    @app.get("/v1/estimates/{key}", response_model=answers.EstimateAnswer, responses=polled, tags=["estimates"])
    async def estimate_of(key: str, request: Request) -> Response:
        """Return the estimate of a traced question, or 202 while it is traced."""
        return await service.answer_of("estimate", key, service.caller(request))

    @app.get("/v1/fits/{key}", response_model=answers.FitAnswer, responses=polled, tags=["estimates"])
    async def fit_of(key: str, request: Request) -> Response:
        """Return what fits of a traced question, or 202 while it is traced."""
        return await service.answer_of("fit", key, service.caller(request))

    @app.get("/v1/plans/{key}", response_model=answers.PlanAnswer, responses=polled, tags=["several GPUs"])
    async def plan_of(key: str, request: Request) -> Response:
        """Return the layouts of a traced question, or 202 while it is traced."""
        return await service.answer_of("plan", key, service.caller(request))

    @app.get("/v1/devices", responses=_REFUSALS, tags=["devices"])
    async def devices() -> answers.DevicesAnswer:
        """Return the GPU models that are described."""
        from featurize.device.device_spec import describe_device, device_names

        specs = sorted(map(describe_device, device_names()), key=lambda one: (one.memory_mib, one.name))
        fields = [
            answers.DeviceFields(name=one.name, memory_mib=one.memory_mib, vendor=one.architecture.vendor)
            for one in specs
        ]
        return answers.DevicesAnswer(devices=fields)

    @app.get("/healthz", tags=["operations"])
    async def healthz() -> dict[str, str]:
        """Answer as long as this process does."""
        return {"status": "ok"}

    @app.get("/readyz", responses={503: {"model": answers.Health}}, tags=["operations"])
    async def readyz(response: Response) -> answers.Health:
        """Return 503 until the models are loaded and the traces are alive."""
        health = await service.health()
        response.status_code = HTTPStatus.OK if health.ready else HTTPStatus.SERVICE_UNAVAILABLE
        return health

    @app.get("/metrics", response_class=PlainTextResponse, tags=["operations"])
    async def metrics() -> Response:
        """Return metrics in Prometheus's text format."""
        return PlainTextResponse(await service.metrics_text(), headers={"content-type": _PROMETHEUS})


def _add_problems(app: FastAPI) -> None:
    @app.exception_handler(Problem)
    async def of_problem(request: Request, problem: Problem) -> Response:
        return _problem_response(request, problem)

    @app.exception_handler(RequestValidationError)
    async def of_body(request: Request, error: RequestValidationError) -> Response:
        return _problem_response(request, invalid_body(error.errors(), ""))

    @app.exception_handler(HTTPException)
    async def of_http(request: Request, error: HTTPException) -> Response:
        names = {404: "not-found", 405: "method-not-allowed"}
        name = names.get(error.status_code, "invalid-request")
        headers = dict(error.headers or {})
        return _problem_response(request, Problem(error.status_code, name, str(error.detail), headers=headers))

    @app.exception_handler(EnvironmentProblem)
    async def of_environment(request: Request, _error: EnvironmentProblem) -> Response:
        detail = "The service cannot use its data folder; its operator can see why."
        return _problem_response(request, Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail))

    @app.exception_handler(Exception)  # whose traceback the gate logs
    async def of_failure(request: Request, _error: Exception) -> Response:
        detail = "The service failed on this request; its log has the reason."
        return _problem_response(request, Problem(HTTPStatus.INTERNAL_SERVER_ERROR, "internal", detail))


def _problem_response(request: Request, problem: Problem) -> Response:
    body = json.dumps(problem.document(request.scope.get("request_id"))).encode()
    return Response(body, int(problem.status), dict(problem.headers), PROBLEM_TYPE)
