"""The environment of processes of a private Ray on this machine.

Start reading at `own_session_environment`.
"""

from __future__ import annotations

import os
import secrets


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
