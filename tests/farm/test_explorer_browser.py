"""The explorer in a real browser: by mouse, by keyboard alone, on a narrow screen, in the dark and on paper."""

from __future__ import annotations

import shutil

import pytest

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
PATHS = (
    "/",
    "/runs",
    "/nights",
    "/sql",
    "/runs/",
    "/devices/",
)


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def tab(browser, service):
    context = browser.new_context(base_url=service.url)
    tab = context.new_page()
    problems: list[str] = []
    tab.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    yield tab
    context.close()
    assert not problems


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


@pytest.mark.parametrize("path", PATHS)
def test_a_narrow_screen_needs_no_scrolling_across(tab, path):
    tab.set_viewport_size({"width": 390, "height": 800})
    tab.goto(path if path == "/" else path.rstrip("/"))
    if path in ("/runs/", "/devices/"):
        tab.locator(f'td a[href^="{path}"]').first.click()
    assert tab.evaluate("document.documentElement.scrollWidth") <= 390
    assert tab.evaluate(BROKEN_WORDS) == []
