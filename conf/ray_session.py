"""The environment of processes of a private Ray on this machine.

Start reading at `own_session_environment`; `putting_last` keeps the working folder from hiding our packages there.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path


def own_session_environment() -> dict[str, str]:
    """Return environment variables of a private Ray: set before `ray.init`, inherited by its processes.

    Checked on Ray 2.60: without RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 its servers listen on every interface, whatever
    node address is asked for (`_private/services.py`, `get_node_ip_address`).
    """
    wanted = {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # loopback only
        "RAY_AUTH_MODE": "token",  # other users of this machine can reach loopback too
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_memory_monitor_refresh_ms": "0",  # it kills actors; each worker watches its own trial's memory
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    return {name: value for name, value in wanted.items() if name not in os.environ}


def putting_last(folder: str | None) -> Callable[[], None]:
    """Return a function that has a Ray worker search the folder last; None changes nothing.

    Ray puts the driver's working folder first on a worker's path, where a `workers.py` of the user's would hide our
    package. A function that a function defines is sent by value, so a worker can call this one before any import of
    ours.
    """

    root = str(Path(__file__).parents[1])  # an editable install's own finder is asked only after the whole path

    def put_last() -> None:
        import sys

        if folder is not None:
            others = [path for path in sys.path if path not in ("", folder)]
            sys.path[:] = [*others, *(() if root in others else (root,)), folder]

    return put_last
