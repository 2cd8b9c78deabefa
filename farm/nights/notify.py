"""Notifies a command or a web address of a cycle's outcome. Start reading at `notify`."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import urllib.request
from collections.abc import Mapping
from typing import Any

from farm.queue.leftovers import SESSION_VARIABLE

_COMMAND_S = 60.0
_WEBHOOK_S = 15.0


def notify(message: Mapping[str, Any], command: str | None, webhook: str | None) -> list[str]:
    """Send the message as JSON to the command's standard input and by POST to the address.

    The command also finds the outcome in $GPUFARM_OUTCOME. Returns a sentence for each problem: a message that cannot
    be sent fails no night.
    """
    text, problems = json.dumps(message), []
    if command is not None:
        problems += _run(command, text, str(message["outcome"]))
    if webhook is not None:
        request = urllib.request.Request(webhook, text.encode(), {"Content-Type": "application/json"}, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=_WEBHOOK_S):
                pass
        # HTTP errors, refused connections and timeouts are OSErrors.
        except (OSError, ValueError, http.client.HTTPException) as error:
            problems.append(f"notify.webhook: {str(error).strip()}")
    return problems


def _run(command: str, text: str, outcome: str) -> list[str]:
    """Run the command in its own session, so that all its processes can be killed if it hangs."""
    environment = {**os.environ, "GPUFARM_OUTCOME": outcome}
    environment.pop(SESSION_VARIABLE, None)  # what the command leaves running is the user's, not the farm's to sweep
    try:
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        return [f"notify.command: {error.strerror}"]
    with process:
        try:
            _, errors = process.communicate(text.encode(), timeout=_COMMAND_S)
        except subprocess.TimeoutExpired:
            return [f"notify.command took longer than {_COMMAND_S:g} s and was killed"]
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if process.returncode == 0:
        return []
    last_line = errors.decode(errors="replace").strip().splitlines()[-1:]
    return [f"notify.command ended with {process.returncode}{': ' + last_line[0] if last_line else ''}"]
