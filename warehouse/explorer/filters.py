"""Which rows a page shows: facets, order and page, as the URL holds them, and as SQL.

Start reading at `Filters`. The SQL has its values inside, so that it can be shown, copied and run as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from conf.errors import UsageError, unknown_name
from warehouse.explorer.listings import RUNS, ListedTable
from warehouse.tables.sql_text import sql_text

ROWS_OF_A_PAGE = 50
NULL = "(null)"  # a facet's value where the column is NULL
_MOST_PAGES = 100_000
_LONGEST = 200  # characters of a value
_MOST_VALUES = 50


@dataclass(frozen=True)
class Filters:
    """One state of a list. Raises `UsageError` for what no URL of ours holds.

    listing  the table
    chosen   facet -> values, of which a row has one
    equal    key of the listing -> value that its column must have
    order    a column, with `-` before it for descending order; empty: the listing's own
    page     from 1
    """

    listing: ListedTable = RUNS
    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    equal: Mapping[str, str] = field(default_factory=dict)
    order: str = ""
    page: int = 1

    @classmethod
    def of(cls, query: Sequence[tuple[str, str]], listing: ListedTable = RUNS) -> Filters:
        """Return the state of a URL's query, as pairs."""
        chosen: dict[str, tuple[str, ...]] = {}
        equal: dict[str, str] = {}
        order, page = "", 1
        for name, value in query:
            if len(value) > _LONGEST or "\0" in value:
                raise UsageError(f"{name}: a value of at most {_LONGEST} characters is wanted")
            if name in listing.facets:
                values = chosen.get(name, ())
                chosen[name] = values if value in values else (*values, value)
                if len(chosen[name]) > _MOST_VALUES:
                    raise UsageError(f"{name}: at most {_MOST_VALUES} values can be chosen")
            elif name in listing.keys:
                equal[name] = value
            elif name == "order":
                if value.removeprefix("-") not in listing.columns:
                    raise unknown_name("order", value, listing.columns)
                order = "" if value == listing.order else value
            elif name == "page":
                if not (value.isascii() and value.isdigit() and 1 <= int(value) <= _MOST_PAGES):
                    raise UsageError(f"page must be from 1 to {_MOST_PAGES:,}, got {value!r}")
                page = int(value)
            else:
                raise unknown_name("key", name, (*listing.facets, *listing.keys, "order", "page"))
        return cls(listing, chosen, {name: value for name, value in equal.items() if value}, order, page)

    def query(self) -> str:
        """Return the URL's query; equal states have equal ones."""
        pairs = [(facet, value) for facet in self.listing.facets for value in sorted(self.chosen.get(facet, ()))]
        pairs += sorted(self.equal.items())
        pairs += [("order", self.order)] if self.order else []
        pairs += [("page", str(self.page))] if self.page != 1 else []
        return urlencode(pairs)

    def toggled(self, facet: str, value: str) -> Filters:
        """Return the state with a facet's value chosen, or no longer."""
        values = self.chosen.get(facet, ())
        changed = tuple(one for one in values if one != value) if value in values else (*values, value)
        chosen = {name: kept for name, kept in {**self.chosen, facet: changed}.items() if kept}
        return dataclasses.replace(self, chosen=chosen, page=1)

    def ordered_by(self, column: str) -> Filters:
        """Return the state in a column's order, turned round where it is already."""
        order = column if self.effective_order == f"-{column}" else f"-{column}"
        return dataclasses.replace(self, order="" if order == self.listing.order else order, page=1)

    def at_page(self, page: int) -> Filters:
        """Return the state at another page."""
        return dataclasses.replace(self, page=page)

    def where(self, without: str | None = None) -> str:
        """Return the condition of the chosen values, but those of the facet `without`; empty where there is none."""
        parts = [_condition(facet, values) for facet, values in self.chosen.items() if facet != without and values]
        parts += [f"{self.listing.keys[name]} = {sql_text(value)}" for name, value in self.equal.items()]
        return f" WHERE {' AND '.join(parts)}" if parts else ""

    @property
    def effective_order(self) -> str:
        """Return the order, the listing's own where the URL has none."""
        return self.order or self.listing.order

    @property
    def order_sql(self) -> str:
        """Return the order, by the rows' ids within equal values; NULLs come last."""
        column = self.effective_order.removeprefix("-")
        direction = "DESC" if self.effective_order.startswith("-") else "ASC"
        return f"{column} {direction} NULLS LAST, {self.listing.row_id}"

    def rows_sql(self) -> str:
        """Return the query of the rows of this state, of all pages."""
        columns = ", ".join(self.listing.columns)
        return f"SELECT {columns} FROM {self.listing.relation}{self.where()} ORDER BY {self.order_sql}"

    def page_sql(self) -> str:
        """Return the query of this page's rows."""
        return f"{self.rows_sql()} LIMIT {ROWS_OF_A_PAGE} OFFSET {ROWS_OF_A_PAGE * (self.page - 1)}"

    def total_sql(self) -> str:
        """Return the query of the number of rows, and of those in which each column has a value."""
        counts = ", ".join(f"count({name})" for name in self.listing.columns)
        return f"SELECT count(*), {counts} FROM {self.listing.relation}{self.where()}"

    def counts_sql(self) -> str:
        """Return the query of facets, values and counts, each facet's without its own choice."""
        free = [facet for facet in self.listing.facets if facet not in self.chosen]
        parts = []
        if free:
            columns = ", ".join(free)
            case = " ".join(f"WHEN grouping({facet}) = 0 THEN {sql_text(facet)}" for facet in free)
            value = " ".join(f"WHEN grouping({facet}) = 0 THEN {facet}::VARCHAR" for facet in free)
            sets = ", ".join(f"({facet})" for facet in free)
            parts.append(
                f"SELECT CASE {case} END AS facet, CASE {value} END AS value, count(*) AS count FROM "
                f"(SELECT {columns} FROM {self.listing.relation}{self.where()}) GROUP BY GROUPING SETS ({sets})"
            )
        parts += [
            f"SELECT {sql_text(facet)} AS facet, {facet}::VARCHAR AS value, count(*) AS count "
            f"FROM {self.listing.relation}{self.where(facet)} GROUP BY 2"
            for facet in self.chosen
        ]
        return " UNION ALL ".join(parts) + " ORDER BY facet, count DESC, value"


def _condition(facet: str, values: Sequence[str]) -> str:
    named = [sql_text(value) for value in values if value != NULL]
    parts = [f"{facet} IN ({', '.join(named)})"] if named else []
    parts += [f"{facet} IS NULL"] if NULL in values else []
    return parts[0] if len(parts) == 1 else f"({' OR '.join(parts)})"
