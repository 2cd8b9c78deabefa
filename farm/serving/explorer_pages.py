"""The explorer's routes: pages on the service's data folder, and the API's page. Start reading at `add_pages`."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http import HTTPStatus
from typing import Any
from urllib.parse import urlencode

import pyarrow as pa
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse

from conf.errors import CommandError, UsageError, first_few
from farm.serving.gate import Scrubber
from farm.serving.settings import LimitSettings
from featurize.configs.trial import TrialConfig, config_of_one_gpu, config_of_row
from featurize.device.device_spec import DESCRIBED, describe_device, known_device
from learn.estimation.estimating import estimate_many
from learn.estimation.fast_estimates import FAST_LOOPS, fast_problem
from learn.estimation.job_estimate import Estimate
from learn.job.training_job import LEGEND, loop_of_source
from learn.rows.data import get_target
from warehouse.explorer.filters import LISTINGS, Filters, ListedTable
from warehouse.explorer.limited_query import (
    CSV,
    PAGE,
    PARQUET,
    ExplorerReader,
    QueryLimits,
    QueryRows,
    TooLong,
    run_limited,
)
from warehouse.explorer.pages import (
    BOUND,
    POLICY,
    device_page,
    devices_page,
    list_page,
    night_report,
    nights_page,
    overview,
    rendered,
    run_page,
)
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RUN_RATIOS
from warehouse.reading.connection import connect
from warehouse.reading.pairing import shift_of

READERS = 4  # pages in parallel, and as many users' queries, each in a process; others wait
_FIRST_QUERY = "SELECT family, status, count(*) AS runs FROM runs GROUP BY ALL ORDER BY runs DESC"
_BESIDE = ("peak_memory_mib", "smact", "smocc", "drama", "step_time_ms")
_WRITERS: dict[str, tuple[str, Callable[[pa.Table, io.BytesIO], None]]] = {
    CSV: ("text/csv; charset=utf-8", pyarrow.csv.write_csv),
    PARQUET: (
        "application/vnd.apache.parquet",
        lambda table, to: pyarrow.parquet.write_table(table, to, compression="zstd"),
    ),
}
AnswerPage = Callable[[ExplorerReader], Response]
Ends = list[Callable[[], None]]  # functions that interrupt a page's queries


class ExplorerPages:
    """Renders pages in threads, each with a separate connection."""

    def __init__(self, folder: DataFolder, limits: LimitSettings, scrubber: Scrubber) -> None:
        self.folder, self._limits, self._scrubber = folder, limits, scrubber
        self._threads = ThreadPoolExecutor(READERS, "pages")
        self._queries = ThreadPoolExecutor(READERS, "queries")
        self._page_limits = self._query_limits(limits.rows, limits.answer_mib)
        self._file_limits = self._query_limits(limits.download_rows, limits.download_mib)

    def _query_limits(self, rows: int, mib: int) -> QueryLimits:
        return QueryLimits(self._limits.query_s, int(self._limits.query_gib * 2**30), rows, mib * 2**20)

    def close(self) -> None:
        """End the threads."""
        for threads in (self._threads, self._queries):
            threads.shutdown(wait=False, cancel_futures=True)

    async def answer(self, page: AnswerPage) -> Response:
        """Return the page, or a page with the problem."""
        return await self._in(self._threads, lambda ends: self._read(page, ends))

    async def sql(self, sql: str) -> Response:
        """Return the page of a user's query."""
        return await self._in(self._queries, lambda ends: self._sql(sql, ends))

    async def download(self, make_sql: Callable[[], str], kind: str, name: str) -> Response:
        """Return a query's rows as a file."""
        if kind not in _WRITERS:
            return self.problem(HTTPStatus.NOT_FOUND, "No such page", "Rows are downloaded as csv or parquet.")
        return await self._in(self._queries, lambda ends: self._file(make_sql(), kind, name, ends))

    async def _in(self, threads: ThreadPoolExecutor, answer: Callable[[Ends], Response]) -> Response:
        """Answer in a thread. A query ends with its client."""
        ends: Ends = []
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, self._answer_or_problem, answer, ends)
        except asyncio.CancelledError:
            for end in ends:
                end()
            raise

    def _read(self, page: AnswerPage, ends: Ends) -> Response:
        with ExplorerReader(connect(self.folder, share=self._page_limits.share), self._limits.query_s) as reader:
            ends.append(reader.interrupt)
            return page(reader)

    def _answer_or_problem(self, answer: Callable[[Ends], Response], ends: Ends) -> Response:
        try:
            return answer(ends)
        except TooLong as error:
            return self.problem(HTTPStatus.SERVICE_UNAVAILABLE, "The query took too long", error)
        except UsageError as error:
            return self.problem(HTTPStatus.BAD_REQUEST, "That is not a page", error)
        except CommandError as error:
            return self.problem(HTTPStatus.INTERNAL_SERVER_ERROR, "The data folder cannot be read", error)

    def problem(self, status: HTTPStatus, title: str, detail: object) -> Response:
        """Return a page with a problem."""
        return self.html("problem", status, title=title, detail=self._scrubber.text(str(detail)))

    def html(self, template: str, status: HTTPStatus = HTTPStatus.OK, **values: Any) -> Response:
        """Return a rendered page."""
        return HTMLResponse(rendered(template, **values), status, {"content-security-policy": POLICY})

    def _query(self, sql: str, kind: str, limits: QueryLimits, ends: Ends) -> tuple[pa.Table, bool]:
        """Return the rows of a user's query without paths of the server, and whether there are more."""
        table, has_more = run_limited(self.folder, sql, kind, limits, ends)
        return _scrub(table, self._scrubber), has_more

    def _sql(self, sql: str, ends: Ends) -> Response:
        answer, problem, status = None, None, HTTPStatus.OK
        try:
            table, has_more = self._query(sql, PAGE, self._page_limits, ends)
            rows = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
            answer = QueryRows(tuple(table.column_names), rows, has_more)
        except UsageError as error:
            problem = self._scrubber.text(str(error))
            status = HTTPStatus.SERVICE_UNAVAILABLE if isinstance(error, TooLong) else HTTPStatus.BAD_REQUEST
        query, limit = urlencode({"sql": sql}), self._limits.rows
        return self.html("sql", status, sql=sql, answer=answer, problem=problem, limit=limit, query=query)

    def _file(self, sql: str, kind: str, name: str, ends: Ends) -> Response:
        table, has_more = self._query(sql, kind, self._file_limits, ends)
        if has_more:
            raise UsageError(
                f"a download has up to {self._limits.download_rows:,} rows and {self._limits.download_mib} MiB; "
                "choose fewer rows, or run `python -m warehouse.query` on the service's machine"
            )
        media_type, write = _WRITERS[kind]
        to = io.BytesIO()
        write(table, to)
        headers = {"content-disposition": f'attachment; filename="{name}.{kind}"'}
        return Response(to.getvalue(), media_type=media_type, headers=headers)

    def run(self, reader: ExplorerReader, run_id: str) -> Response:
        """Return the page of one run."""
        page = run_page(reader, run_id)
        if page is None:
            return self.problem(HTTPStatus.NOT_FOUND, "No such run", f"There is no run {run_id} in this warehouse.")
        beside, notes = self._estimate_beside(page["run"])
        return self.html("run", page=page, beside=beside, notes=notes)

    def device(self, reader: ExplorerReader, name: str, source: str | None) -> Response:
        """Return the page of one device model, with the residuals of `method=fast`."""
        page = device_page(reader, name, source, self._estimate_runs)
        if page is None:
            return self.problem(HTTPStatus.NOT_FOUND, "No such device", f"No run of this warehouse is of {name}.")
        return self.html("device", page=page, loops=_other_loops(page["source"]))

    def night(self, name: str) -> Response:
        """Return the report of one night, as the night wrote it."""
        content = night_report(self.folder, name)
        if content is None:
            return self.problem(HTTPStatus.NOT_FOUND, "No such night", f"There is no report of {name}.")
        return HTMLResponse(content, headers={"content-security-policy": POLICY})

    def _estimate_runs(self, runs: Sequence[Mapping[str, Any]]) -> list[dict[str, float | None] | None]:
        """Return the estimates of one device's runs by `method=fast`, None if a run has none."""
        estimates: list[dict[str, float | None] | None] = [None] * len(runs)
        name = known_device(runs[0]["device_name"]) if runs else None
        if name is None:
            raise UsageError("There is no description of this device, so that nothing is estimated on it.")
        known = {}
        for place, run in enumerate(runs):
            with contextlib.suppress(CommandError, ArithmeticError, ValueError):
                config = config_of_one_gpu(run["config"])
                if fast_problem(config, describe_device(name), self.folder) is None:
                    known[place] = config
        for place, estimate in self._estimate_each(known, name, _machine_of(runs[0])).items():
            estimates[place] = {target: getattr(estimate, target) for target in (*_BESIDE, BOUND)}
        return estimates

    def _estimate_each(
        self, configs: Mapping[int, TrialConfig], device: str, machine: str | None
    ) -> dict[int, Estimate]:
        """Return the estimates by place; a config that cannot be estimated does not affect the others."""
        with contextlib.suppress(CommandError, ArithmeticError, ValueError):
            return dict(zip(configs, self._fast(list(configs.values()), device, machine), strict=True))
        estimates = {}
        for place, config in configs.items():
            with contextlib.suppress(CommandError, ArithmeticError, ValueError):
                (estimates[place],) = self._fast([config], device, machine)
        return estimates

    def _fast(self, configs: Sequence[TrialConfig], device: str, machine: str | None) -> list[Estimate]:
        return estimate_many(configs, method="fast", device=device, machine=machine, data=self.folder)

    def _estimate_beside(self, run: Mapping[str, Any]) -> tuple[list[tuple[str, Any, Any, str]], list[str]]:
        """Return the estimate of `method=fast` beside the measurement, and notes, such as why there is none."""
        trace = f"`python -m learn.estimate run={run['run_id']}` traces it."
        device = known_device(run["device_name"])
        if device is None:
            return [], [f"No estimate: the device {run['device_name']} is not described."]
        try:
            config = config_of_row(run["config"])
            if problem := fast_problem(config, describe_device(device), self.folder):
                return [], [f"No estimate at once: {problem}. {trace}"]
            (estimate,) = self._fast([config], device, _machine_of(run))
        except (CommandError, ArithmeticError, ValueError) as error:
            return [], [f"No estimate: {self._scrubber.text(str(error))}"]
        rows = []
        for name in _BESIDE:
            estimated, known = getattr(estimate, name), run[name]
            rows.append((name, estimated, known, _difference(name, estimated, known)))
        rows.insert(1, ("99 % bound of memory, MiB", estimate.upper_mib, run["peak_memory_mib"], ""))
        by_text: dict[str, list[str]] = defaultdict(list)
        for name, text in _other_loops(run["source"]).items():
            if run[name] is not None:
                by_text[text].append(name)
        notes = [*estimate.warnings, *(f"{', '.join(names)}: {text}" for text, names in by_text.items())]
        return rows, notes


def _scrub(table: pa.Table, scrubber: Scrubber) -> pa.Table:
    """Return a table without paths of the server in its texts."""
    for place, field in enumerate(table.schema):
        column = table.column(place)
        if pa.types.is_string(field.type):
            for path, label in scrubber.labels:
                column = pyarrow.compute.replace_substring(column, path, label)
        elif pa.types.is_nested(field.type):
            column = pa.array([scrubber.values(value) for value in column.to_pylist()], field.type)
        table = table.set_column(place, field, column)
    return table


def add_pages(app: FastAPI, pages: ExplorerPages) -> None:
    """Add the explorer's routes to the application."""

    @app.get("/", include_in_schema=False)
    async def first_page() -> Response:
        return await pages.answer(lambda reader: pages.html("overview", page=overview(reader)))

    for listing in LISTINGS.values():
        _add_listing(app, pages, listing)

    @app.get("/runs/{run_id:path}", include_in_schema=False)
    async def run(run_id: str) -> Response:
        return await pages.answer(lambda reader: pages.run(reader, run_id))

    @app.get("/devices", include_in_schema=False)
    async def devices() -> Response:
        return await pages.answer(lambda reader: pages.html("devices", page=devices_page(reader)))

    @app.get("/devices/{name:path}", include_in_schema=False)
    async def device(name: str, source: str | None = None) -> Response:
        return await pages.answer(lambda reader: pages.device(reader, name, source))

    @app.get("/nights", include_in_schema=False)
    async def nights() -> Response:
        return await pages.answer(lambda _: pages.html("nights", page=nights_page(pages.folder)))

    @app.get("/nights/{name}", include_in_schema=False)
    async def night(name: str) -> Response:
        return await pages.answer(lambda _: pages.night(name))

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        return pages.html("api", document=app.openapi(), type_in_words=_type_in_words)

    @app.get("/sql", include_in_schema=False)
    async def sql(sql: str = _FIRST_QUERY) -> Response:
        return await pages.sql(sql)

    @app.get("/sql.{kind}", include_in_schema=False)
    async def sql_file(kind: str, sql: str = _FIRST_QUERY) -> Response:
        return await pages.download(lambda: sql, kind, "rows")


def _add_listing(app: FastAPI, pages: ExplorerPages, listing: ListedTable) -> None:
    """Add the routes of one list, and of its downloads."""

    @app.get(f"/{listing.name}", include_in_schema=False)
    async def rows(request: Request) -> Response:
        query = request.query_params.multi_items()
        return await pages.answer(lambda reader: pages.html("list", page=list_page(reader, Filters.of(query, listing))))

    @app.get(f"/{listing.name}.{{kind}}", include_in_schema=False)
    async def file(kind: str, request: Request) -> Response:
        query = request.query_params.multi_items()
        return await pages.download(lambda: Filters.of(query, listing).rows_sql(), kind, listing.name)


def _machine_of(run: Mapping[str, Any]) -> str | None:
    """Return the machine whose memory outside the allocator a run's figures include; None: the data folder's.

    Simulated devices follow their descriptions, and descriptions follow the published measurements.
    """
    return None if run["source"] == "measured" else DESCRIBED


def _other_loops(source: str) -> dict[str, str]:
    """Return notes by column on targets whose training loop in `method=fast` differs from that of the source's runs."""
    own_loop = loop_of_source(source)
    text = f"Not the same loop. In these runs, {LEGEND[own_loop]}; in the estimate, {{}}."
    return {
        get_target(name).column: text.format(LEGEND[loop])
        for name, loop in FAST_LOOPS.items()
        if loop != own_loop and name != "memory"
    }


def _difference(name: str, estimated: float | None, known: float | None) -> str:
    """Return the estimate's error as text: in percent, or in points for ratios."""
    shift = shift_of(name, known, estimated)
    if shift is None or not math.isfinite(shift):
        return ""
    return f"{100 * shift:+.1f} {'points' if name in RUN_RATIOS else '%'}"


_LONGEST_CHOICE = 12  # values of a field to list


def _type_in_words(schema: Mapping[str, Any]) -> str:
    """Return a schema's type in words: `integer 1 to 16384`, `list of text`, `one of full, fast`."""
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if choices := schema.get("enum"):
        return f"one of {first_few([str(choice) for choice in choices], _LONGEST_CHOICE, ', ')}"
    if options := schema.get("anyOf"):
        return " or ".join(dict.fromkeys(_type_in_words(option) for option in options))
    kind = schema.get("type", "any")
    if kind == "array":
        return f"list of {_type_in_words(schema.get('items', {}))}"
    if kind == "string":
        return "text"
    low, high = schema.get("minimum", schema.get("exclusiveMinimum")), schema.get("maximum")
    bounds = f" {low:g} to {high:g}" if None not in (low, high) else f" from {low:g}" if low is not None else ""
    return f"{kind}{bounds}"
