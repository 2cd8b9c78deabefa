"""Exit codes of developers' commands, which are in no table; `conf.cli.overrides.load_settings` reads their arguments.

Start reading at `exit_code`; what users call goes through `conf.cli.command_line`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

from conf.cli.command_line import EXIT_INTERRUPTED, EXIT_USAGE, print_error
from conf.errors import CommandError


def exit_code(work: Callable[[], int | None]) -> int:
    """Run work that the same command can continue, and return its exit code, or 2 or 130 as users' commands do."""
    try:
        return work() or 0
    except CommandError as error:
        print_error(error)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("stopped; run the same command again to continue", file=sys.stderr)
        return EXIT_INTERRUPTED
