"""The keys of `python -m farm.serve`. Start reading at `ServeSettings`."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from conf.cli.settings import Checked, data_key, key, section
from featurize.job.code_names import trust_key

LOOPBACK_NAME = "localhost"


@dataclass(frozen=True, kw_only=True)
class LimitSettings(Checked, section="limits"):
    """The `limits` key: limits of one request and of all together."""

    body_kib: int = key(1024, "largest request body, KiB", "int >= 1")
    batch: int = key(1000, "most jobs of one batch", "int >= 1")
    inline_s: float = key(10.0, "longest time for an answer without a trace, s", "number > 0")
    concurrent: int = key(256, "requests that one process works on; beyond its share, a client gets 429", "int >= 1")
    queued: int = key(1000, "questions that wait for a trace; beyond its share, a client gets 429", "int >= 1")
    stored_mib: int = key(64, "stored questions and answers, MiB; the oldest answers go first", "int >= 4")
    trace_s: float = key(600.0, "longest time for one trace, s; its process is then killed", "number > 0")
    trace_gib: float = key(8.0, "most memory for one trace, GiB; its process is then killed", "number > 0")
    wait_s: float = key(60.0, "longest `Prefer: wait=N` that is granted for a trace, s", "number > 0")
    rows: int = key(10_000, "most rows of an explorer query", "int >= 1")
    download_rows: int = key(1_000_000, "most rows of an explorer download", "int >= 1")
    query_s: float = key(8.0, "longest time for an explorer query, s", "number > 0")
    connections: int = key(1000, "open connections of one process; then the longest idle closes", "int >= 1")
    peer_connections: int = key(400, "open connections from one address, or one /64 of IPv6", "int >= 1")
    head_kib: int = key(64, "largest request line with its headers, KiB", "int >= 1")
    head_s: float = key(10.0, "longest time from a connection or first byte to the end of the headers, s", "number > 0")
    body_s: float = key(30.0, "longest time for a request body to arrive, s", "number > 0")
    unread_s: float = key(30.0, "longest time for an answer to stay unread, s", "number > 0")
    query_gib: float = key(1.0, "most memory for an explorer query, GiB", "number > 0")
    answer_mib: int = key(16, "largest answer of an explorer query, MiB", "int >= 1")
    download_mib: int = key(128, "largest explorer download, MiB", "int >= 1")


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Checked):
    """The address, and what is served. Raises `UsageError` that names every bad key together.

      python -m farm.serve                                        on http://127.0.0.1:8350, with pages at /
      python -m farm.serve port=0 data=/srv/farm                  a free port, printed; another data folder
      python -m farm.serve host=0.0.0.0 token_file=/etc/gpufarm/tokens
      curl -s localhost:8350/v1/estimate -H 'content-type: application/json' \\
        -d '{"config": {"family": "mlp", "batch_size": 256, "input_size": 4096, "classes": 10, "depth": 4}}'

    A job is traced once, in a child process. If that takes longer than the request waits, fetch the answer from the
    URL that `202 Accepted` names. Jobs are data: trial configs, Hugging Face configs, and models of torchvision,
    timm and transformers by name. trust= names further modules whose models may be built; scripts=true lets clients
    send whole scripts, which run with this service's rights, in a limited child process. A service that
    listens beyond this machine asks each client for a token: token_file= has one a line. docs/service.md describes the
    API.
    """

    host: str = key("127.0.0.1", "address to listen on; any but this machine's own needs token_file=")
    port: int = key(8350, "0 takes a free one", "int 0 to 65535")
    processes: int = key(2, "processes that answer requests", "int >= 1")
    traces: int = key(2, "child processes that trace at the same time; one client has at most all but one", "int >= 1")
    data: str | None = data_key()
    token_file: str | None = key(None, "tokens that clients send as `Authorization: Bearer TOKEN`, one a line", "path")
    open_metrics: bool = key(False, "true: /metrics needs no token")
    certificate: str | None = key(None, "PEM file of the service's certificate chain, for HTTPS", "path")
    private_key: str | None = key(None, "PEM file of the certificate's key", "path")
    trust: tuple[str, ...] = trust_key("modules whose models clients may name, as in [mypackage.nets]")
    scripts: bool = key(False, "true: clients may send training scripts, which run with this service's rights")
    explorer: bool = key(True, "false: no pages, only the API")
    cache_s: float = key(3600.0, "how long an answer is reused for the same question, s", "number > 0")
    log: str = key("stderr", "where requests are logged, a JSON object a line: stderr, none, or a file", "new path")
    limits: LimitSettings = section(LimitSettings)

    def problems(self) -> Iterator[str]:
        if self.token_file is not None:
            yield from _token_problems(self.token_file)
        elif not self.is_loopback:
            yield (
                f"host={self.host} is open to other machines: give token_file=FILE with a token a line, "
                "or host=127.0.0.1"
            )
        if (self.certificate is None) != (self.private_key is None):
            yield "certificate and private_key go together"
        for name in ("certificate", "private_key"):
            path = getattr(self, name)
            if path is not None and not Path(path).is_file():
                yield f"{name}={path} is not a file"

    @property
    def is_loopback(self) -> bool:
        """Return whether only this machine can connect."""
        if self.host == LOOPBACK_NAME:
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    @property
    def tokens(self) -> tuple[str, ...]:
        """Return the tokens of the file; none without one."""
        return () if self.token_file is None else tuple(_tokens(Path(self.token_file).read_text(encoding="utf-8")))


def _tokens(text: str) -> list[str]:
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _token_problems(path: str) -> list[str]:
    least = 16  # characters: shorter ones can be guessed
    try:
        tokens = _tokens(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        return [f"token_file={path} cannot be read: {reason}"]
    if not tokens:
        return [f"token_file={path} holds no token; write one a line"]
    if any(len(token) < least or not token.isascii() or " " in token for token in tokens):
        return [f"token_file={path}: a token is at least {least} ASCII characters without spaces, one a line"]
    return []
