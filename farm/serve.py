"""`python -m farm.serve`: estimates over HTTP, and pages on the warehouse. Start reading at `entry`."""

from __future__ import annotations

from conf.cli.command_line import command
from conf.cli.commands import naming_the_extra
from farm.serving.settings import ServeSettings


def entry(settings: ServeSettings) -> int:
    """Serve until SIGTERM or Ctrl-C. Returns the exit code. Raises `UsageError` for an address that is taken."""
    with naming_the_extra():
        from farm.serving.server import serve
    return serve(settings)


if __name__ == "__main__":
    command("serve", entry)
