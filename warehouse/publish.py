"""`python -m warehouse.publish out=FOLDER licence=...`: a snapshot as a data set that others can use.

Start reading at `entry`; `warehouse.exchange.publishing` writes it.
"""

from __future__ import annotations

from conf.cli.command_line import command
from conf.errors import print_lines
from warehouse.exchange.publishing import PublishSettings, publish


def entry(settings: PublishSettings) -> int:
    """Publish the snapshot and print the report."""
    print_lines(publish(settings).lines())
    return 0


if __name__ == "__main__":
    command("publish", entry)
