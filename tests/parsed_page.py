"""Report pages parsed for tests, well-formed or refused.

Start reading at `ParsedPage`.
"""

from __future__ import annotations

import html.parser

VOID = frozenset({"meta", "br", "img", "hr", "link", "input"})


class ParsedPage(html.parser.HTMLParser):
    """A page's tags, attributes and texts outside of `<style>`. An element that is not closed fails.

    `attributes` holds (name, value) of every element, `elements` the same with the tag before it.
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.texts: list[str] = []
        self.elements: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self.feed(text.replace("<wbr>", ""))  # which only offers a place to break a line
        self.close()
        assert not self._open

    @property
    def attributes(self) -> list[tuple[str, str | None]]:
        return [(name, value) for _tag, name, value in self.elements]

    def values(self, tag: str, attribute: str) -> list[str]:
        """The values of an attribute of a tag's elements."""
        return [value for *of, value in self.elements if of == [tag, attribute] and value is not None]

    @property
    def text(self) -> str:
        """All texts, each run of white space as one blank."""
        return " ".join(" ".join(self.texts).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.elements += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.texts.append(data)
