"""Load on a service of this machine: answers a second, latency, and what a killed process costs.

Start reading at `main`. Requests are sent at fixed times whether or not earlier ones are answered, and latency counts
from those times, so that a slow service is not asked less. Every answer is compared with the library's own. Jobs are
asked with `method=fast`: what is measured is the service, and no trace.

  python -m tests.bench.bench_serve rate=800 seconds=20              half of the jobs new, half asked before
  python -m tests.bench.bench_serve rate=800 seconds=20 kill=true    a process that answers is killed halfway
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.farm.served import served
from warehouse.files.folder import DataFolder

_ATTEMPTS = 5
_LONGEST_S = 10.0
_CONNECTIONS = 32
_DEVICES = ("A100-SXM4-40GB", "H100-SXM5-80GB")


@dataclass
class Outcome:
    """latencies_s: from when a request was due to its answer; retried: requests sent again on a new connection."""

    latencies_s: list[float] = field(default_factory=list)
    answers: dict[int, bytes] = field(default_factory=dict)
    lost: int = 0
    retried: int = 0
    refused: int = 0


async def load(port: int, bodies: Sequence[bytes], rate: float, at_half: object = None) -> Outcome:
    """Send each body when it is due, over connections that are kept."""
    outcome = Outcome()
    waiting: asyncio.Queue[tuple[int, float]] = asyncio.Queue()
    workers = [asyncio.create_task(_worker(port, bodies, waiting, outcome)) for _ in range(_CONNECTIONS)]
    began = time.perf_counter()
    for place in range(len(bodies)):
        due = began + place / rate
        if (pause := due - time.perf_counter()) > 0:
            await asyncio.sleep(pause)
        if place == len(bodies) // 2 and callable(at_half):
            at_half()
        waiting.put_nowait((place, due))
    await waiting.join()
    for worker in workers:
        worker.cancel()
    return outcome


async def _worker(
    port: int, bodies: Sequence[bytes], waiting: asyncio.Queue[tuple[int, float]], outcome: Outcome
) -> None:
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
    while True:
        place, due = await waiting.get()
        for attempt in range(_ATTEMPTS):
            try:
                if connection is None:
                    connection = await asyncio.open_connection("127.0.0.1", port)
                status, body = await asyncio.wait_for(_ask(*connection, bodies[place]), _LONGEST_S)
                break
            except (OSError, EOFError, TimeoutError):
                connection = None
                outcome.retried += 1
                await asyncio.sleep(0.01 * attempt)
        else:
            outcome.lost += 1
            waiting.task_done()
            continue
        outcome.latencies_s.append(time.perf_counter() - due)
        if status == 200:
            outcome.answers[place] = body
        else:
            outcome.refused += 1
        waiting.task_done()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> tuple[int, bytes]:
    head = (
        b"POST /v1/estimate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    )
    writer.write(head % len(body) + body)
    answer = await reader.readuntil(b"\r\n\r\n")
    length = int(re.search(rb"content-length: (\d+)", answer)[1])  # type: ignore[index]
    return int(answer[9:12]), await reader.readexactly(length)


def _wrong(questions: Sequence[dict[str, Any]], answers: dict[int, bytes]) -> int:
    """Return how many answers differ from the library's, in memory and bound."""
    from learn import estimate_many

    wrong = 0
    for device in _DEVICES:
        places = [place for place in answers if questions[place]["device"] == device]
        local = estimate_many([questions[place]["config"] for place in places], method="fast", device=device)
        for place, local_estimate in zip(places, local, strict=True):
            given = json.loads(answers[place])["estimate"]
            pairs = (
                (given[name], getattr(local_estimate, name))
                for name in ("peak_memory_mib", "upper_mib", "step_time_ms")
            )
            wrong += any(abs(answered - other) > 1e-6 * abs(other) for answered, other in pairs)
    return wrong


def questions_of(n: int, seed: int) -> list[dict[str, Any]]:
    """Return questions, half of them asked before, of three families on two GPU models."""
    from featurize.configs.space import own_space, sample_range

    draw = random.Random(seed)
    new = [
        {"config": config.to_mapping(), "device": draw.choice(_DEVICES), "method": "fast"}
        for family in ("cnn", "mlp", "transformer")
        for config in sample_range(own_space(family), seed, 0, -(-n // 6))
    ]
    draw.shuffle(new)
    questions: list[dict[str, Any]] = []
    for question in new:
        questions += [question, draw.choice(questions or [question])]
    return questions


def main(arguments: Sequence[str]) -> int:
    """Run the load and print its figures. Returns 1 where an answer was lost or wrong."""
    gc.disable()  # its pauses would count as the service's
    given = dict(argument.split("=", 1) for argument in arguments)
    rate, seconds = float(given.get("rate", 800)), float(given.get("seconds", 20))
    kill = given.get("kill") == "true"
    questions = questions_of(int(rate * seconds), seed=1)
    bodies = [json.dumps(question).encode() for question in questions]
    with tempfile.TemporaryDirectory() as folder:
        data = DataFolder.resolve(f"{folder}/data").create()
        with served(data.root, "explorer=false", f"processes={given.get('processes', 2)}") as service:
            warm = asyncio.run(load(service.port, bodies[:200], rate / 4))
            assert not warm.lost
            kill_one = (lambda: service.answering()[0].kill()) if kill else None
            outcome = asyncio.run(load(service.port, bodies, rate, kill_one))
    latencies = sorted(outcome.latencies_s)
    answered = len(outcome.answers)

    def latency(share: float) -> str:
        return f"{1e3 * latencies[min(int(share * len(latencies)), len(latencies) - 1)]:.1f} ms"

    wrong = _wrong(questions, outcome.answers)
    print(f"{len(bodies)} requests at {rate:g}/s{', one process killed halfway' if kill else ''}")
    counts = f"refused {outcome.refused}, lost {outcome.lost}, wrong {wrong}, sent again {outcome.retried}"
    print(f"answered {answered}, {counts}")
    print(f"latency p50 {latency(0.5)}, p90 {latency(0.9)}, p99 {latency(0.99)}, longest {latency(1)}")
    return int(outcome.lost + outcome.refused + wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
