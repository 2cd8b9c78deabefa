"""The frame of every HTML page that a command writes: one file that needs no network and runs no script.

Start reading at `html_page`.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from importlib import resources

from conf.plain_text import one_line


def html_page(title: str, style: str, parts: Iterable[str], *, images: bool = False) -> str:
    """Return a whole page.

    Args:
        title: plain text, as anybody may have written it.
        style: CSS, which `stylesheet` reads.
        parts: HTML of the body; empty ones are left out.
        images: whether the page holds pictures, as `data:` addresses.
    """
    sources = "style-src 'unsafe-inline'" + ("; img-src data:" if images else "")
    body = "\n".join(filter(None, parts))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; {sources}">\n'
        f"<title>{escape(one_line(title))}</title>\n<style>\n{style}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def stylesheet(package: str, name: str) -> str:
    """Return a style sheet that lies in a package of the project."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")
