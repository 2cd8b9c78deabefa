"""Which runs a page shows: facets, order and page, as the URL holds them, and as SQL.

Start reading at `Filters`. The SQL has its values inside, so that it can be shown, copied and run as it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlencode

from conf.errors import UsageError, unknown_name
from warehouse.sql_text import sql_text

FACETS = ("source", "family", "status", "device_name", "precision", "optimizer", "torch_version", "quality")
COLUMNS = (
    "run_id", "family", "status", "source", "device_name", "batch_size", "precision", "optimizer", "parameters",
    "peak_memory_mib", "smact", "smocc", "drama", "step_time_ms", "power_w", "started_at",
)  # fmt: skip
ROWS_OF_A_PAGE = 50
NULL = "(null)"  # a facet's value where the column is NULL
_DEFAULT_ORDER = "-started_at"
_MOST_PAGES = 100_000
_LONGEST = 200  # characters of a value
_MOST_VALUES = 50


@dataclass(frozen=True)
class Filters:
    """One state of the list of runs. Raises `UsageError` for what no URL of ours holds.

    chosen   facet -> values, of which a run has one
    job      only runs of this job; None: of all
    order    a column of `COLUMNS`, with `-` before it for descending order
    page     from 1
    """

    chosen: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    job: str | None = None
    order: str = _DEFAULT_ORDER
    page: int = 1

    @classmethod
    def of(cls, query: Sequence[tuple[str, str]]) -> Filters:
        """Return the state of a URL's query, as pairs."""
        chosen: dict[str, tuple[str, ...]] = {}
        job, order, page = None, _DEFAULT_ORDER, 1
        for name, value in query:
            if len(value) > _LONGEST or "\0" in value:
                raise UsageError(f"{name}: a value of at most {_LONGEST} characters is wanted")
            if name in FACETS:
                values = chosen.get(name, ())
                chosen[name] = values if value in values else (*values, value)
                if len(chosen[name]) > _MOST_VALUES:
                    raise UsageError(f"{name}: at most {_MOST_VALUES} values can be chosen")
            elif name == "job":
                job = value or None
            elif name == "order":
                if value.removeprefix("-") not in COLUMNS:
                    raise unknown_name("order", value, COLUMNS)
                order = value
            elif name == "page":
                if not (value.isascii() and value.isdigit() and 1 <= int(value) <= _MOST_PAGES):
                    raise UsageError(f"page must be from 1 to {_MOST_PAGES:,}, got {value!r}")
                page = int(value)
            else:
                raise unknown_name("key", name, (*FACETS, "job", "order", "page"))
        return cls(chosen, job, order, page)

    def query(self) -> str:
        """Return the URL's query; equal states have equal ones."""
        pairs = [(facet, value) for facet in FACETS for value in sorted(self.chosen.get(facet, ()))]
        pairs += [("job", self.job)] if self.job is not None else []
        pairs += [("order", self.order)] if self.order != _DEFAULT_ORDER else []
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
        order = column if self.order == f"-{column}" else f"-{column}"
        return dataclasses.replace(self, order=order, page=1)

    def at_page(self, page: int) -> Filters:
        """Return the state at another page."""
        return dataclasses.replace(self, page=page)

    def where(self, without: str | None = None) -> str:
        """Return the condition of the chosen values, but those of the facet `without`; empty where there is none."""
        parts = [_condition(facet, values) for facet, values in self.chosen.items() if facet != without and values]
        if self.job is not None:
            parts.append(f"job_id = {sql_text(self.job)}")
        return f" WHERE {' AND '.join(parts)}" if parts else ""

    @property
    def order_sql(self) -> str:
        """Return the order, by `run_id` within equal values; NULLs come last."""
        column = self.order.removeprefix("-")
        return f"{column} {'DESC' if self.order.startswith('-') else 'ASC'} NULLS LAST, run_id"

    def rows_sql(self) -> str:
        """Return the query of the runs of this state, of all pages."""
        return f"SELECT {', '.join(COLUMNS)} FROM runs{self.where()} ORDER BY {self.order_sql}"

    def page_sql(self) -> str:
        """Return the query of this page's runs."""
        return f"{self.rows_sql()} LIMIT {ROWS_OF_A_PAGE} OFFSET {ROWS_OF_A_PAGE * (self.page - 1)}"

    def counts_sql(self) -> str:
        """Return the query of facets, values and counts, each facet's without its own choice."""
        free = [facet for facet in FACETS if facet not in self.chosen]
        parts = []
        if free:
            columns = ", ".join(free)
            case = " ".join(f"WHEN grouping({facet}) = 0 THEN {sql_text(facet)}" for facet in free)
            value = " ".join(f"WHEN grouping({facet}) = 0 THEN {facet}::VARCHAR" for facet in free)
            sets = ", ".join(f"({facet})" for facet in free)
            parts.append(
                f"SELECT CASE {case} END AS facet, CASE {value} END AS value, count(*) AS runs FROM "
                f"(SELECT {columns} FROM runs{self.where()}) GROUP BY GROUPING SETS ({sets})"
            )
        parts += [
            f"SELECT {sql_text(facet)}, {facet}::VARCHAR, count(*) FROM runs{self.where(facet)} GROUP BY 2"
            for facet in self.chosen
        ]
        return " UNION ALL ".join(parts) + " ORDER BY facet, runs DESC, value"


def _condition(facet: str, values: Sequence[str]) -> str:
    named = [sql_text(value) for value in values if value != NULL]
    parts = [f"{facet} IN ({', '.join(named)})"] if named else []
    parts += [f"{facet} IS NULL"] if NULL in values else []
    return parts[0] if len(parts) == 1 else f"({' OR '.join(parts)})"
