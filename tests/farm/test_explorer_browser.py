"""The explorer in a real browser: by mouse, by keyboard alone, on a narrow screen, in the dark and on paper."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.learn.learn_rows import make_configs, write_batch
from tests.warehouse.warehouse_rows import run_row, samples
from warehouse.exchange.publishing import PublishSettings, publish
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import Run

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# Parts of a heading between underscores that stand on more than one line, and tables that do not fit their place.
BROKEN_WORDS = """() => [...document.querySelectorAll('th, summary, .facets b')].flatMap(one => {
  const texts = document.createTreeWalker(one, NodeFilter.SHOW_TEXT), broken = []
  while (texts.nextNode()) {
    const range = document.createRange()
    range.selectNodeContents(texts.currentNode)
    const word = texts.currentNode.textContent.trim()
    const tops = new Set([...range.getClientRects()].map(box => Math.round(box.top)))
    if (!/[\\s-]/.test(word) && tops.size > 1) broken.push(word)
  }
  return broken
})"""
CUT_TABLES = """() => [...document.querySelectorAll('.wide')].filter(one => one.scrollWidth > one.clientWidth + 1)
  .map(one => one.getAttribute('aria-label'))"""
PATHS = (
    "/",
    "/runs",
    "/kernels",
    "/collocations",
    "/datasets",
    "/devices",
    "/nights",
    "/sql",
    "/runs/",
    "/devices/",
    "/runs?family=odd",
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, explorer):
    context = browser.new_context(base_url=explorer.url)
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    yield tab
    context.close()
    assert not problems


def test_facets_order_and_pages_are_clicked_and_stand_in_the_address(tab):
    tab.goto("/runs")
    whole = tab.locator("h1").inner_text()
    tab.locator("aside a", has_text="mlp").first.click()
    assert "family=mlp" in tab.url and tab.locator("h1").inner_text() != whole
    assert tab.locator('aside a[aria-current="true"]').inner_text().split()[0] == "mlp"
    tab.locator("th a", has_text="peak_memory_mib").click()
    cells = tab.locator(".wide tbody tr td:nth-child(10)").all_inner_texts()
    memory_mib = [float(text.replace(",", "")) for text in cells if text != "–"]
    assert memory_mib and memory_mib == sorted(memory_mib, reverse=True) and "order=-peak_memory_mib" in tab.url
    tab.go_back()
    assert "order" not in tab.url
    tab.locator('aside a[aria-current="true"]').click()
    assert tab.locator("h1").inner_text() == whole
    tab.get_by_role("link", name="Next →").click()
    assert "page=2" in tab.url and "Page 2 of 3" in tab.locator("main").inner_text()


def test_a_run_is_reached_by_the_keyboard_alone(tab):
    tab.goto("/runs?status=ok&source=measured")
    tab.keyboard.press("Tab")
    assert tab.locator(":focus").inner_text() == "Skip to the content"
    tab.keyboard.press("Enter")
    for _ in range(200):
        tab.keyboard.press("Tab")
        focused = tab.locator(":focus")
        outline = focused.evaluate("element => getComputedStyle(element).outlineStyle")
        assert outline not in ("none", ""), focused.inner_text()
        if (focused.get_attribute("href") or "").startswith("/runs/"):
            break
    run = focused.inner_text()
    tab.keyboard.press("Enter")
    assert tab.locator("h1").inner_text() == run
    assert "Estimate beside the run" in tab.locator("main").inner_text()


def test_a_query_is_edited_and_its_rows_are_downloaded(tab):
    tab.goto("/runs?family=mlp")
    tab.get_by_text("SQL", exact=True).last.click()
    tab.locator("textarea").fill("SELECT 6 * 7 AS answer")
    tab.get_by_role("button", name="Run").click()
    assert tab.url.split("?")[0].endswith("/sql") and tab.locator("tbody td").inner_text() == "42"
    with tab.expect_download() as download:
        tab.get_by_role("link", name="CSV").click()
    assert download.value.path().read_text().split() == ['"answer"', "42"]


@pytest.mark.parametrize("path", PATHS)
def test_a_narrow_screen_needs_no_scrolling_across(tab, path):
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.goto(path if path == "/" else path.rstrip("/"))
    if path in ("/runs/", "/devices/"):
        tab.locator(f'td a[href^="{path}"]').first.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.evaluate(BROKEN_WORDS) == []


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    data = DataFolder(tmp_path_factory.mktemp("published") / "data").create()
    write_batch(data, make_configs(20, seed=4), source="measured", job="measured")
    reasons = {"telemetry_missing": json.dumps({"dcgm": "no answer " * 20}), "batch_size": 8, "precision": "fp32"}
    writer = RunWriter(data)
    writer.write(Run(**run_row(1, device_name="NVIDIA A100-SXM4-40GB", optimizer="adam", **reasons)), samples(5))
    return publish(PublishSettings(out=str(data.root.parent / "set"), data=str(data.root), licence="CC0-1.0")).root


@pytest.mark.parametrize("width", [390, 1280])
def test_published_pages_break_no_name_and_are_cut_nowhere(browser, published, width):
    tab = browser.new_page(viewport={"width": width, "height": 800})
    (run,) = (published / "pages").glob("runs-J-000001*.html")
    for page in (published / "pages" / "index.html", published / "pages" / "runs.html", run):
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, page.name
        assert tab.evaluate(BROKEN_WORDS) == [], page.name
        if width == 1280:
            assert tab.evaluate(CUT_TABLES) == [], page.name
    tab.close()


def test_the_overview_draws_each_label_and_where_the_runs_lie(tab):
    tab.goto("/")
    pictures = tab.locator("main svg").evaluate_all("all => all.map(one => one.getAttribute('aria-label'))")
    assert any(label.startswith("peak_memory_mib of 1") for label in pictures), pictures
    assert any(label.startswith("drama of 1") for label in pictures)
    assert "peak memory [GiB]: rows by cell" in pictures
    assert tab.locator("main svg rect").count() > 30


def test_dark_screens_get_dark_pages_and_paper_none_of_the_controls(tab):
    colours = {}
    for scheme in ("light", "dark"):
        tab.emulate_media(color_scheme=scheme)
        tab.goto("/runs")
        colours[scheme] = [
            tab.locator(css).first.evaluate(
                "(element, name) => getComputedStyle(element)[name].match(/\\d+/g).slice(0, 3).map(Number)", name
            )
            for css, name in (("body", "backgroundColor"), ("body", "color"), ("td a", "color"), (".badge", "color"))
        ]
    for scheme, (ground, *inks) in colours.items():
        assert all(_contrast(ground, ink) >= 4.5 for ink in inks), scheme
    assert sum(colours["light"][0]) > 700 > 200 > sum(colours["dark"][0])
    tab.emulate_media(media="print", color_scheme="dark")
    assert not tab.locator("nav").is_visible() and not tab.locator("aside").is_visible()
    assert tab.locator("tbody tr").first.is_visible()
    assert tab.locator("body").evaluate("element => getComputedStyle(element).backgroundColor") == "rgb(255, 255, 255)"


def _contrast(one, other) -> float:
    """Return the contrast ratio of two sRGB colours, as WCAG 2 defines it."""
    brighter, darker = sorted(map(_luminance, (one, other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def _luminance(colour) -> float:
    parts = [value / 255 for value in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
