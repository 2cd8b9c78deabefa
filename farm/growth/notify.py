"""Tells a command or a web address how a cycle ended. Start reading at `notify`."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Mapping
from typing import Any

_COMMAND_S = 60.0
_WEBHOOK_S = 15.0


def notify(message: Mapping[str, Any], command: str | None, webhook: str | None) -> list[str]:
    """Hand the message on as JSON: to the command's standard input (its `outcome` is also in $GPUFARM_OUTCOME), and by
    POST to the address. What went wrong with it, a sentence each: nobody's night fails because of a message."""
    text, problems = json.dumps(message), []
    if command is not None:
        environment = {**os.environ, "GPUFARM_OUTCOME": str(message["outcome"])}
        try:
            done = subprocess.run(
                command, shell=True, input=text.encode(), env=environment, timeout=_COMMAND_S, capture_output=True
            )
            if done.returncode:
                said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
                problems.append(f"notify.command ended with {done.returncode}{': ' + said[0] if said else ''}")
        except subprocess.TimeoutExpired:
            problems.append(f"notify.command took longer than {_COMMAND_S:g} s and was killed")
        except OSError as error:
            problems.append(f"notify.command: {error.strerror}")
    if webhook is not None:
        request = urllib.request.Request(webhook, text.encode(), {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_WEBHOOK_S):
                pass
        except (OSError, ValueError) as error:  # HTTP errors, refused connections and timeouts are OSErrors
            problems.append(f"notify.webhook: {error}")
    return problems
