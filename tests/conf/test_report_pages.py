"""The templates that draw every report page: escaping, every block, what a page may load."""

from typing import get_args

import pytest

from conf.plain_text import clean_text
from conf.reports import blocks as b
from conf.reports.blocks import print_blocks, render_for_notebook, render_page
from conf.reports.charts import Drawing
from tests.parsed_page import ParsedPage

EVIL = "</title></style><script>alert('x')</script>\"><img src=x onerror=alert(1)>&amp;{{ 7 * 7 }}"


def evil_svg():
    drawing = Drawing()
    drawing.text("axis", 1, 2, EVIL, "end")
    drawing.path("grid", "M0 0H1", EVIL)
    drawing.rect("h1", 0, 0, 1, 1, title=EVIL, radius=3)
    drawing.circle("dot", 0, 0, 1, EVIL)
    return drawing.svg(10, 10, EVIL)


CHART = b.Chart(EVIL, evil_svg(), (b.Lead(EVIL),), newest_first_seen=True)
STACK = b.ShareBar((b.SharePart("k1", 0.25, EVIL), b.SharePart("k2", 0.75, EVIL)), tall=True)
BLOCKS = (
    b.Bullets((EVIL,)),
    CHART,
    b.Charts((CHART, CHART)),
    b.Drawn(evil_svg()),
    b.Facts(((EVIL, b.Code(EVIL)),)),
    b.Fold(EVIL, (b.Fold(EVIL, (b.Lead(EVIL),), is_open=True),)),
    b.Heading(EVIL),
    b.Lead(EVIL, b.Code(EVIL)),
    b.Legend({EVIL: "k1"}),
    b.Callout(EVIL, "bad"),
    b.Outcome("good", EVIL, EVIL),
    b.Preformatted(EVIL),
    b.SideBySide((b.Group(EVIL, (b.Lead(EVIL),)),)),
    STACK,
    b.table((EVIL, f"*{EVIL}", EVIL, "", ""), [(EVIL, EVIL, 12345, STACK, b.Swatch("k1", EVIL))], marked=[0]),
)


def page(*blocks, title="a page"):
    section = b.Section("key", title, blocks, name=title)
    return render_page(b.Page(title=title, head=blocks, sections=(section,)))


def test_every_block_is_among_those_that_these_tests_draw():
    assert {type(block) for block in BLOCKS} == set(get_args(b.Block))


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: type(block).__name__)
def test_a_block_shows_hostile_text_and_obeys_none_of_it(block):
    parsed = ParsedPage(render_for_notebook(block))
    assert any(EVIL in text for text in (*parsed.texts, *(value for _, value in parsed.attributes)) if text)
    assert "script" not in parsed.tags and not [name for name, _ in parsed.attributes if name.startswith("on")]
    assert "img" not in parsed.tags


def test_a_page_of_all_blocks_loads_nothing_and_keeps_its_title_in_one_line():
    text = page(*BLOCKS, title=f"{EVIL}\n\x1b[31m")
    assert text.startswith("<!doctype html>\n")
    parsed = ParsedPage(text)
    assert not {"script", "link", "iframe", "object"} & set(parsed.tags)
    addresses = [value for name, value in parsed.attributes if name in ("src", "href")]
    assert addresses and all(value.startswith(("data:image/", "#")) for value in addresses)
    title = text[text.index("<title>") : text.index("</title>")]
    assert "\n" not in title and "\x1b" not in text
    assert (
        "default-src 'none'" in text
        and "url(" not in text
        and "@import" not in text
        and "http" not in text.replace("http-equiv", "")
    )


@pytest.mark.parametrize(("is_terminal", "name"), [("1", "x" * 43), ("0", "x" * 263)])
def test_a_terminals_table_keeps_its_figures_and_names_their_characters(monkeypatch, capsys, is_terminal, name):
    monkeypatch.setenv("TTY_COMPATIBLE", is_terminal)
    monkeypatch.setenv("COLUMNS", "80")
    figures = ("1.2 %", "3.4 %", "12.0 %", "99.1 %")
    heads = ("*file", "*estimator", "mean", "median", "p90", "bound")
    print_blocks(
        b.table(heads, [(name, "hybrid (published)", *figures)], words=2), b.Lead("left out: a:car:.csv [bold]")
    )
    printed = capsys.readouterr().out
    assert all(word in printed for word in (*heads[2:], *figures, "left out: a:car:.csv [bold]"))
    assert printed.count("x") == len(name)


def test_text_of_a_terminal_is_cleaned_and_too_long_text_keeps_its_end():
    assert clean_text("\x1b[31mred\x00\r\nnext") == "red�\nnext"
    assert clean_text("x" * 30_000 + "end").endswith("xend") and "10,003 characters left out" in clean_text(
        "x" * 30_000 + "end"
    )
    assert clean_text(None) == "–"
