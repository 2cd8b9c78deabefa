"""The explorer's pages: counts, filters in the URL, SQL, downloads, one run, and what hostile values do to them."""

from __future__ import annotations

import io
import json
import re
import statistics
from urllib.parse import quote, urlencode

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from conf.errors import UsageError
from tests.farm.explored import HOSTILE
from tests.parsed_page import ParsedPage
from tests.warehouse.warehouse_rows import ask
from warehouse.explorer.filters import LISTINGS, RUNS, Filters
from warehouse.explorer.limited_query import PAGE, QueryLimits, run_limited


def page(service, path: str, status: int = 200) -> ParsedPage:
    code, headers, content = service.send("GET", path)
    text, policy = content.decode(), headers["content-security-policy"]
    assert code == status, text
    assert "script-src" not in policy and "default-src 'none'" in policy and "<script" not in text.lower()
    return ParsedPage(text)


def links(parsed: ParsedPage) -> list[str]:
    return parsed.values("a", "href")


def test_a_facet_filters_the_rows_keeps_its_other_values_and_downloads_the_rows_of_its_sql(service, explored):
    families = dict(ask(explored, "SELECT family, count(*) FROM runs GROUP BY 1"))
    family = max(families, key=families.get)
    parsed = page(service, f"/runs?family={family}")
    assert f"{families[family]:,} runs" in parsed.text
    assert [other for other, count in families.items() if f"{other} {count:,}" not in parsed.text] == []
    sql = Filters.of([("family", "mlp"), ("order", "parameters")]).rows_sql()
    ids = [run_id for run_id, *_ in ask(explored, sql)]
    for path in (f"/sql.parquet?{urlencode({'sql': sql})}", "/runs.parquet?family=mlp&order=parameters"):
        content = service.send("GET", path)[2]
        assert ids and pq.read_table(io.BytesIO(content)).column("run_id").to_pylist() == ids


def test_the_pages_of_a_list_hold_each_run_once_in_order(service, explored):
    shown, path = [], "/runs?order=-batch_size"
    while path:
        parsed = page(service, path)
        shown += [link for link in links(parsed) if link.startswith("/runs/")]
        following = links(parsed) if "Next" in parsed.text else []
        path = next((link for link in following if f"page={len(shown) // 50 + 1}" in link), None)
    known = ask(explored, "SELECT '/runs/' || run_id FROM runs ORDER BY batch_size DESC NULLS LAST, run_id")
    assert shown == [path for (path,) in known]


def test_a_run_shows_its_labels_its_telemetry_and_its_estimate(service, explored):
    ((run_id, mib),) = ask(explored, "SELECT run_id, peak_memory_mib FROM runs WHERE family = 'mlp' LIMIT 1")
    ((odd,),) = ask(explored, "SELECT run_id FROM runs WHERE family = 'odd'")
    parsed = page(service, f"/runs/{run_id}")
    assert run_id in parsed.text and f"{mib:,.1f}" in parsed.text and "Estimate beside the run" in parsed.text
    parsed = page(service, f"/runs/{odd}")
    assert any("memory_used_mib over time, up to 8" in label for label in parsed.values("svg", "aria-label"))
    assert HOSTILE in parsed.text


@pytest.mark.parametrize("of_a_kind", [2, pytest.param(40, marks=pytest.mark.wide)])
def test_every_kind_of_link_leads_to_a_page(service, of_a_kind):
    """Links of one kind have the same folder and as many keys in their query; each whole list is a kind of its own."""
    followed, waiting = {}, ["/"]
    while waiting:
        path = waiting.pop(0)
        status, headers, content = service.send("GET", path)
        assert status == 200, path
        targets = links(ParsedPage(content.decode())) if headers["content-type"].startswith("text/html") else []
        for link in (target.split("#")[0] for target in targets if target.startswith("/")):
            place, _, query = link.partition("?")
            folder = place if place.count("/") == 1 and not query else place.rsplit("/", 1)[0] + "/"
            alike = followed.setdefault((folder, min(query.count("="), 3)), set())
            if link not in alike and len(alike) < of_a_kind:
                alike.add(link)
                waiting.append(link)
    assert {"/", "/runs/", "/devices/", "/nights/"} <= {place for place, _ in followed}


@pytest.mark.parametrize(("name", "rows"), [("kernels", 6), ("collocations", 2), ("runs", 123)])
def test_each_list_counts_its_rows_by_facet(service, explored, name, rows):
    listing, parsed = LISTINGS[name], page(service, f"/{name}")
    ((source, count),) = ask(
        explored, f"SELECT source, count(*) FROM {listing.relation} GROUP BY 1 ORDER BY 2 DESC, 1 LIMIT 1"
    )
    assert f"{rows} {listing.rows_are}" in parsed.text and f"{source} {count}" in parsed.text
    chosen = page(service, f"/{name}?source={source}").text
    assert f"{count} {listing.row_is if count == 1 else listing.rows_are}" in chosen and "NULL" in chosen
    status, _, content = service.send("GET", f"/{name}.parquet?source={source}")
    assert status == 200 and pq.read_table(io.BytesIO(content)).num_rows == count


def test_a_device_shows_how_far_its_estimates_are_off(service, explored):
    from featurize.configs.trial import config_of_row
    from learn.estimation.estimating import estimate_many

    ((name,),) = ask(explored, "SELECT device_name FROM runs WHERE source = 'measured' AND status = 'ok' LIMIT 1")
    assert f"/devices/{quote(name)}" in links(page(service, "/devices"))
    parsed = page(service, f"/devices/{quote(name)}")
    runs = ask(
        explored,
        "SELECT config, peak_memory_mib FROM runs WHERE status = 'ok' AND peak_memory_mib > 0 "
        f"AND device_name = '{name}' AND source = 'measured'",
    )
    done = estimate_many([config_of_row(config).to_mapping() for config, _ in runs], method="fast", device=name)
    off = [abs(100 * (one.peak_memory_mib / mib - 1)) for one, (_, mib) in zip(done, runs, strict=True)]
    assert f"all {len(runs)} {statistics.median(off):.1f}" in parsed.text


def test_the_page_of_the_api_shows_every_route_and_field_and_its_examples_are_answered(service):
    parsed, document = page(service, "/docs"), service.send("GET", "/openapi.json")[2]
    routes = [f"{method.upper()} {path}" for path, methods in document["paths"].items() for method in methods]
    schemas = [document["components"]["schemas"][f"{name}Request"] for name in ("Estimate", "Fit", "Plan")]
    schemas.append(document["components"]["schemas"]["AdmitGpu"])
    fields = [field for schema in schemas for field in schema["properties"]]
    assert [text for text in (*routes, *fields) if text not in parsed.text] == []
    examples = map(json.loads, re.findall(r"/v1/estimate --json '(.+?)'", parsed.text))
    statuses = [service.post("/v1/estimate", example)[0] for example in examples]
    assert len(statuses) == 2 and set(statuses) <= {200, 202}


def test_the_nights_are_listed_and_lead_to_their_reports(service):
    parsed = page(service, "/nights")
    assert "ok 11, oom 1" in parsed.text and HOSTILE in parsed.text and "drama by gbdt" in parsed.text
    assert "2026-11-21 cannot be read" in parsed.text
    assert b"the night" in service.send("GET", "/nights/2026-11-20")[2]
    assert "no report" in page(service, "/nights/2026-11-19", 404).text
    assert "night's name" in page(service, "/nights/..%5clatest", 400).text


def test_what_is_not_there_or_no_page_says_so(service):
    assert "no run" in page(service, "/runs/nope", 404).text
    assert "known: " in page(service, "/runs?colour=red", 400).text
    assert "page must be" in page(service, "/runs?page=0", 400).text
    assert page(service, "/runs.exe", 404).text


@pytest.mark.parametrize(
    ("sql", "status", "words"),
    [
        ("SELECT family, count(*) FROM runs GROUP BY ALL", 200, "mlp"),
        ("SELECT * FROM range(20000)", 200, "10,000 rows, and more"),
        ("DROP TABLE runs", 400, "read-only"),
        ("SELECT 1; SELECT 2", 400, "one SQL statement"),
        pytest.param("COPY runs TO '/tmp/x.csv'", 400, "read-only", marks=pytest.mark.wide),
        ("SELECT * FROM read_csv('/etc/passwd')", 400, "disabled"),
        pytest.param("SELECT * FROM '/etc/passwd'", 400, "", marks=pytest.mark.wide),
        ("ATTACH '/tmp/x.db'", 400, "read-only"),
        ("SELEC 1", 400, "syntax error"),
        ("SELECT count(*) FROM range(1000000) a, range(1000000) b", 503, "longer than the limit"),
        ("SELECT current_setting('memory_limit') || current_setting('temp_directory') AS x", 200, "768.0 MiB"),
        ("SELECT now() AS at, [1, NULL] AS list, 'ab'::BLOB AS blob", 200, "+00 [1, NULL] ab"),
        ("EXPLAIN SELECT 1", 400, "begins with"),
        pytest.param("", 400, "one SQL statement", marks=pytest.mark.wide),
    ],
)
def test_a_query_of_the_users_reads_and_nothing_else(service, sql, status, words):
    assert words in page(service, f"/sql?{urlencode({'sql': sql})}", status).text


def test_no_format_names_a_folder_of_the_server(service, explored):
    sql = (
        "SELECT name, value, [value] AS texts, map {'k': value} AS named FROM duckdb_settings() "
        "UNION ALL SELECT database_name, path, [path], map {'k': path} FROM duckdb_databases()"
    )
    here = str(explored.root).replace("'", "''").replace("/", "|")  # the page shows the query as it was typed
    query = urlencode({"sql": f"SELECT replace('{here}', '|', '/') AS here, * FROM ({sql})"})
    rows = pq.read_table(io.BytesIO(service.send("GET", f"/sql.parquet?{query}")[2])).to_pylist()
    for text in page(service, f"/sql?{query}").text, service.send("GET", f"/sql.csv?{query}")[2].decode(), str(rows):
        assert "the data folder" in text and "a temporary folder" in text
        assert str(explored.root) not in text and "/tmp/" not in text and ".duckdb/" not in text


LIMITS = QueryLimits(seconds=60.0, memory_bytes=2**28, rows=100_000, answer_bytes=2**24)


@pytest.mark.parametrize(
    "sql",
    [
        "SELECT list(i) FROM range(300000000) t(i)",
        "SELECT repeat('x', 20000000) || i FROM range(200) t(i)",
        *(
            pytest.param(wide, marks=pytest.mark.wide)
            for wide in (
                "SELECT string_agg(i::VARCHAR, ',') FROM range(1000000000) t(i)",
                "SELECT map(list(i), list(i)) FROM range(300000000) t(i)",
                "SELECT list_reduce(range(100000000), lambda a, b: a + b)",
            )
        ),
    ],
)
def test_a_query_beyond_its_memory_ends_and_the_next_one_runs(explored, sql):
    with pytest.raises(UsageError, match=r"more memory than the limit of 0\.25 GiB"):
        run_limited(explored, sql, PAGE, LIMITS, [])
    assert run_limited(explored, "SELECT 42 AS answer", PAGE, LIMITS, [])[0].to_pylist() == [{"answer": 42}]


def test_a_download_beyond_the_limits_is_refused_rather_than_cut(service):
    assert service.send("GET", "/sql.csv?sql=SELECT+*+FROM+range(5000)")[0] == 200
    assert "up to 5,000 rows and 1 MiB" in page(service, "/sql.csv?sql=SELECT+*+FROM+range(5001)", 400).text
    assert "up to 5,000 rows" in page(service, "/sql.parquet?sql=SELECT+repeat('x',2000000)", 400).text


queries = st.lists(
    st.tuples(st.sampled_from([*RUNS.facets, "job", "order", "page", "x"]), st.text(max_size=30)), max_size=5
)


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from(["/runs", "/runs.csv", "/collocations", "/kernels", "/datasets"]), query=queries)
def test_whatever_a_url_holds_the_page_is_no_failure(service, path, query):
    assert service.send("GET", f"{path}?{urlencode(query, errors='replace')}")[0] in (200, 400)
