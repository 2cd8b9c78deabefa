"""Problem documents (RFC 9457), and what is taken out of their words: paths of the server.

Start reading at `Problem`.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import Any

PROBLEM_TYPE = "application/problem+json"
_TYPES = {  # name -> title; `type` is `/problems/NAME`, which docs/service.md lists
    "invalid-request": "The request is not valid",
    "not-answerable": "The job cannot be estimated",
    "not-yet-known": "The job is not yet known",
    "not-found": "There is no such resource",
    "method-not-allowed": "The resource does not take this method",
    "unsupported-media-type": "The body is not JSON",
    "body-too-large": "The body is too large",
    "scripts-not-allowed": "Scripts are not taken here",
    "unauthorized": "A valid token is needed",
    "host-not-allowed": "The request names another host",
    "too-many-requests": "The service is busy",
    "too-slow": "The answer took too long",
    "internal": "The service failed",
}


@dataclass(eq=False)  # not frozen: Python sets an exception's traceback
class Problem(Exception):
    """One problem document.

    status    HTTP status
    name      key of the table of types
    detail    what to change, without paths of the server
    errors    (JSON Pointer of the field, what is wrong with it)
    headers   further headers of the answer
    """

    status: int
    name: str
    detail: str
    errors: Sequence[tuple[str, str]] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    def document(self, request_id: str | None = None) -> dict[str, Any]:
        """Return the members of the document; `instance` names the request."""
        document: dict[str, Any] = {
            "type": f"/problems/{self.name}",
            "title": _TYPES[self.name],
            "status": self.status,
            "detail": self.detail,
        }
        if request_id is not None:
            document["instance"] = f"urn:request:{request_id}"
        if self.errors:
            document["errors"] = [{"pointer": pointer, "detail": detail} for pointer, detail in self.errors]
        return document


def invalid(detail: str, pointer: str) -> Problem:
    """Return the problem of one field that is wrong."""
    return Problem(HTTPStatus.UNPROCESSABLE_ENTITY, "invalid-request", detail, ((pointer, detail),))


def busy(detail: str, retry_after_s: int = 1) -> Problem:
    """Return the problem of a limit that is reached; the client tries again."""
    headers = {"retry-after": str(retry_after_s)}
    return Problem(HTTPStatus.TOO_MANY_REQUESTS, "too-many-requests", detail, headers=headers)


class Scrubber:
    """Takes the server's own paths out of texts that leave it.

    Args:
        data: The data folder, which becomes `the data folder`.

    labels: (path, words that take its place), the longest path first.
    """

    def __init__(self, data: Path) -> None:
        package = Path(__file__).resolve().parents[2]
        labels = {
            str(data): "the data folder",
            str(package): "the service",
            sys.prefix: "the service",
            sys.base_prefix: "the service",
            tempfile.gettempdir(): "a temporary folder",
            os.getcwd(): "the working folder",
            os.path.expanduser("~"): "the home folder",
        }
        rooted = {path: label for path, label in labels.items() if len(path) > 1}  # `/` itself stands in every URL
        self.labels = sorted(rooted.items(), key=lambda pair: -len(pair[0]))

    def text(self, text: str) -> str:
        """Return the text without this machine's folders."""
        for path, label in self.labels:
            text = text.replace(path, label)
        return text

    def values(self, value: Any) -> Any:
        """Return a value of JSON or Arrow, every text in it scrubbed."""
        if isinstance(value, str):
            return self.text(value) if "/" in value else value
        if isinstance(value, Mapping):
            return {name: self.values(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(self.values(inner) for inner in value)
        return value
