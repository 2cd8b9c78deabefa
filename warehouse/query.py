"""`python -m warehouse.query "SELECT ..."`: one read-only query, as a table, CSV, JSON or Parquet.

Start reading at `entry`; `warehouse.reading.query_answer` asks and writes.
"""

from __future__ import annotations

import sys

from conf.cli.command_line import command
from warehouse.reading.query_answer import QuerySettings, run_query


def entry(settings: QuerySettings) -> int:
    """Run the query."""
    run_query(settings, sys.stdout)
    return 0


if __name__ == "__main__":
    command("query", entry)
