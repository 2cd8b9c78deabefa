"""The documents: generated ones are fresh, commands and links lead somewhere, their queries and code run."""

import contextlib
import importlib.util
import io
import json
import re
from pathlib import Path

import pyarrow as pa
import pytest

import warehouse
from infra import generate_docs
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
RUN = (ROOT / "README.md", ROOT / "docs" / "queries.md")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())


def code_blocks(language):
    """The fenced blocks in that language of the pages whose code is run here."""
    page_blocks = [re.findall(rf"^```{language}\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S) for page in RUN]
    return [block for blocks in page_blocks for block in blocks]


def anchor(heading):
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def test_generated_documents_are_fresh(capsys):
    assert generate_docs.main(["--check"]) == 0, capsys.readouterr().err


@pages
def test_commands_in_documents_exist(page):
    text = page.read_text(encoding="utf-8")
    unknown = {name for name in re.findall(r"python -m ([\w.]*\w)", text) if importlib.util.find_spec(name) is None}
    assert not unknown
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert not set(re.findall(r"(?:`|^    )make ([a-z-]+)", text, re.MULTILINE)) - targets


@pages
def test_links_in_documents_lead_somewhere(page):
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists():
            broken.append(link)
        elif heading:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            if heading not in map(anchor, headings):
                broken.append(link)
    assert not broken


@pytest.fixture(scope="module")
def connection(tmp_path_factory):
    folder = DataFolder.resolve(tmp_path_factory.mktemp("docs") / "data").create()
    writer = RunWriter(folder)
    for index in range(40):
        family = ("cnn", "mlp")[index % 2]
        measured = index % 10 == 1
        out_of_memory = family == "cnn" and index % 4 == 0
        figures = {
            "peak_memory_mib": 1000.0 + 20 * index,
            "step_time_ms": 2.0 + index,
            "steps": 50,
            "smact": 0.95,
            "drama": index / 40,
            "energy_j": None if measured else 100.0 + index,
        }
        run = {
            "run_id": f"{family}-0-{index:06d}",
            "job_id": f"{family}-0",
            "task_index": index,
            "attempt": 1,
            "family": family,
            "config": json.dumps({"family": family, "topology": "pyramid", "batch_size": 32}),
            "status": "oom" if out_of_memory else "ok",
            "source": "measured" if measured else "simulated",
            "device_name": "AMD EPYC" if measured else "A100-SXM4-40GB",
            "batch_size": 32,
            "precision": "fp32",
            "optimizer": "adam",
            "parameters": 1000 * (index + 1),
            "telemetry_missing": json.dumps({"nvml": "no driver here"}) if measured else None,
            "quality": "suspect" if measured else "trusted",
            "quality_reasons": json.dumps({"power_cap": "in 40% of the window"}) if measured else None,
            **({} if out_of_memory else figures),
        }
        samples = {"t_ms": [0.0, 600.0, 1200.0], "phase": ["warmup", "window", "window"]}
        if measured:
            samples |= {"sensor": ["process"] * 3, "rss_mib": [200.0, 250.0, 260.0], "cpu_cores": [None, 0.5, 1.0]}
        else:
            samples |= {"sensor": ["simulated"] * 3, "smact": [0.95] * 3}
        kernels = {
            "phase": ["forward"],
            "operator": ["aten::addmm"],
            "dims": ['{"shapes":[[4096],[4096,1024],[1024,4096]]}'],
            "kernel": ["ampere_sgemm_128x64_tn"],
            "duration_us": [1_800.0],
            "count": [6],
            "steps": [3],
            "timing": ["cupti"],
        }
        writer.write(run, pa.table(samples), pa.table(kernels) if measured else None)
        if measured and not out_of_memory:
            reasons = json.dumps({"other_process": "up to 1 with 900 MiB, in 4 of 9 readings"})
            first = {
                "run_id": f"{run['run_id']}-a1",
                "final": False,
                "quality": "untrusted",
                "quality_reasons": reasons,
            }
            writer.write(run | first, pa.table(samples))
    with contextlib.closing(warehouse.connect(folder)) as opened:
        yield opened


def test_the_documents_have_queries():
    assert len(code_blocks("sql")) >= 6


@pytest.mark.parametrize("sql", code_blocks("sql"))
def test_a_query_of_the_documents_gives_rows(connection, sql):
    rows = connection.execute(sql).fetchall()
    assert rows
    columns = [column[0] for column in connection.description]
    empty = [name for name, values in zip(columns, zip(*rows, strict=True), strict=True) if set(values) == {None}]
    assert not empty, f"all NULL: {empty}"


@pytest.mark.parametrize("code", code_blocks("python"))
def test_code_of_the_documents_runs(code):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert "H200-SXM-141GB" in printed.getvalue() and "no, by the bound" in printed.getvalue()
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [line for line in printed.getvalue().splitlines() if line not in readme] == [], "make readme"
