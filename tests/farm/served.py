"""The service in a process of its own, for tests that ask it over HTTP. Start reading at `served`."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from conf.errors import EnvironmentProblem
from learn.client import Client
from tests.surroundings import PATIENCE_S, await_

JSON = "application/json"
MLP = {"family": "mlp", "batch_size": 64, "input_size": 512, "classes": 10, "depth": 3}
SMALL_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
    "torch_dtype": "bfloat16",
    "rope_scaling": {"rope_type": "linear", "factor": 2.0},
    "bos_token_id": 1,
    "_name_or_path": "someone/model",
}


class Served:
    """A service in a process of its own, on a free port. token: sent with every request that has no other."""

    def __init__(self, data: Path, *arguments: str, token: str | None = None) -> None:
        self.data, self.log, self.token = data, data.parent / "requests.jsonl", token
        command = [sys.executable, "-m", "farm.serve", "port=0", f"data={data}", f"log={self.log}", *arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.rpartition(" on ")[2].strip()
        self.port = int(self.url.rpartition(":")[2])

    def client(self, **options: object) -> Client:
        return Client(self.url, **{"token": self.token, **options})

    def send(self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None):
        """One request as it is: (status, headers, parsed JSON or bytes)."""
        authorization = {} if self.token is None else {"authorization": f"Bearer {self.token}"}
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)) as connection:
            connection.request(method, path, body, {"content-type": JSON, **authorization, **(headers or {})})
            answer = connection.getresponse()
            content = answer.read()
        is_json = JSON in answer.headers.get("content-type", "") or "problem+json" in answer.headers["content-type"]
        return answer.status, answer.headers, json.loads(content) if is_json else content

    def post(self, path: str, body: object, **headers: str):
        return self.send("POST", path, json.dumps(body).encode(), headers)

    def answering(self) -> list[psutil.Process]:
        return self._children("spawn_main")

    def trace_servers(self) -> list[psutil.Process]:
        """The processes that traces are forked from."""
        return self._children("farm.serving.traces:prepare")

    def _children(self, word: str) -> list[psutil.Process]:
        children = []
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
                if word in " ".join(child.cmdline()):
                    children.append(child)
        return children

    @contextlib.contextmanager
    def traces_held(self) -> Iterator[None]:
        """No trace begins within."""
        held = self.trace_servers()
        for server in held:
            server.suspend()
        try:
            yield
        finally:
            for server in held:
                with contextlib.suppress(psutil.NoSuchProcess):  # it ends with its service
                    server.resume()

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        _, self.errors = self.process.communicate(timeout=PATIENCE_S)
        return self.process.returncode


@contextlib.contextmanager
def served(data: Path, *arguments: str, token: str | None = None):
    """Yield a service that is ready, and stop it at the end."""
    service = Served(data, *arguments, token=token)
    try:
        with service.client(timeout_s=PATIENCE_S) as client:
            wait_until_ready(client)
        yield service
    finally:
        if service.process.poll() is None:
            service.stop()


def wait_until_ready(client: Client) -> None:
    def is_ready() -> bool:
        with contextlib.suppress(EnvironmentProblem):  # a busy machine starts it for longer than a client tries
            client.ask("GET", "/readyz")  # which the client asks again as long as it is 503
            return True
        return False

    await_(is_ready, "a service that is ready")
