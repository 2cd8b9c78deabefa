"""The pages beside a published data set: whole, linked, no more in them than in the set."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from warehouse_rows import collocations, kernels, run_row, samples

from tests.parsed_page import ParsedPage
from warehouse.exchange.publishing import PublishSettings, publish
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter

SECRET = "/home/someone/secret-folder"


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    folder = DataFolder.resolve(tmp_path_factory.mktemp("published") / "a'; echo data").create()
    writer = RunWriter(folder)
    rows = [
        run_row(
            index,
            family="cnn" if index % 3 else "mlp",
            source="measured",
            device_name="NVIDIA H100 80GB HBM3",
            node="host17",
            error=f"{SECRET}/x.py <script>",
            window_start_ms=50.0,
            window_end_ms=250.0,
        )
        for index in range(60)
    ]
    for row in rows[:4]:
        writer.write(row, samples(4, memory_used_mib=[1.0, 5.0, 3.0, 2.0]))
    for family in ("cnn", "mlp"):
        writer.write_batch([row for row in rows[4:] if row["family"] == family])
    writer.write(run_row(70, family="cnn"), samples(3), kernels=kernels(2), collocations=collocations())
    out = str(folder.root.parent / "set")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("warehouse.exchange.publishing.check", lambda connection: [])
        return publish(PublishSettings(out=out, data=str(folder.root), licence="CC-BY-4.0", pages=4)).root


def parsed_pages(root) -> dict[str, ParsedPage]:
    return {path.name: ParsedPage(path.read_text()) for path in sorted((root / "pages").iterdir())}


def test_every_link_leads_to_a_file_and_every_file_is_reached(published):
    pages = parsed_pages(published)
    reached, waiting = set(), ["index.html"]
    while waiting:
        name = waiting.pop()
        if name in reached:
            continue
        reached.add(name)
        waiting += [unquote(link) for link in pages[name].values("a", "href") if not link.startswith("#")]
    assert reached == set(pages)
    runs = [name for name in pages if name.startswith("runs-") and "Config" in pages[name].text]
    assert len(runs) == 4


def test_the_pages_count_what_the_tables_hold_and_plot_the_telemetry(published):
    pages = parsed_pages(published)
    assert "61 runs" in pages["index.html"].text and "50 rows of 61" in pages["runs.html"].text
    (mlp,) = [page for name, page in pages.items() if name.startswith("runs-family-mlp")]
    assert "20 runs" in mlp.text
    assert "2 kernels" in pages["kernels.html"].text and "1 member of a group" in pages["collocations.html"].text
    labels = [value for page in pages.values() for tag, name, value in page.elements if name == "aria-label"]
    assert any("memory_used_mib over time, up to 5" in str(label) for label in labels)


def test_the_pages_hold_no_names_no_forms_and_no_script(published):
    for path in (published / "pages").iterdir():
        text = path.read_text()
        assert "host17" not in text and SECRET not in text and "<script" not in text.lower()
        assert "<form" not in text and "default-src 'none'" in text
