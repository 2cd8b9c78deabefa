"""The steps of thirty minutes on a lent GPU: how long each takes, and the commands that it runs.

Start reading at `STEPS`; `infra.offline.steps` runs them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2]
DEVICES = ("cuda", "cpu", "simulated")
# Of the benchmark: a minute of each of a few families, since the published way takes more than a minute a trial.
_BENCH = {
    "cuda": ("families=[cnn,transformer,gpt]", "seconds=60", "repeats=3"),
    "cpu": ("families=[mlp]", "seconds=1", "repeats=2", "n=1"),
}
_TIMEOUT_S = 60  # of a trial, so that none outlasts a call
_WINDOW_S = 10  # of a run at most, for the same reason; steady ones end sooner


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a step runs.

    Args:
        work: The work folder.
        device: One of `DEVICES`.
        gpus: How many devices there are.
        families: Those to measure, none for each step's own.
        n: Trials of each family, None for each step's own number.
    """

    work: Path
    device: str
    gpus: int
    families: tuple[str, ...] = ()
    n: int | None = None

    @property
    def cluster(self) -> str:
        """Ray's, where several GPUs are to be filled and it is installed; one GPU needs no more than this process."""
        return "local" if self.device == "cuda" and self.gpus > 1 and importlib.util.find_spec("ray") else "inline"


@dataclass(frozen=True)
class Step:
    """A step of the plan.

    Args:
        minutes: That it takes in the plan.
        commands: Returns the arguments of Python for each program that it runs; `seconds` are the step's.
        not_here: Returns why it cannot run in this place, None if it can.
        is_left: Returns whether a program that ended by itself has left some of it.
        uses_queue: Whether it runs trials of the farm, in the one data folder.
    """

    minutes: float
    commands: Callable[[Place, float], list[list[str]]]
    not_here: Callable[[Place], str | None] = lambda place: None
    is_left: Callable[[Place], bool] = lambda place: False
    uses_queue: bool = False


def _test(place: Place, seconds: float) -> list[list[str]]:
    report = f"--junitxml={place.work / 'tests.xml'}"
    tests = str(SOURCE / "tests" / "gpu")
    return [
        ["-m", "farm.doctor", f"device={place.device}"],
        ["-m", "pytest", "-m", "gpu", "-vv", "-p", "no:cacheprovider", report, tests],
    ]


def _probes(*names: str) -> Callable[[Place, float], list[list[str]]]:
    def commands(place: Place, seconds: float) -> list[list[str]]:
        own = ["-m", "infra.offline.probes", f"probes=[{','.join(names)}]", f"out={place.work / 'probes'}"]
        return [[*own, f"device={place.device}", f"seconds={seconds:.0f}"]]

    return commands


def _bench(place: Place, seconds: float) -> list[list[str]]:
    return [
        [
            "-m",
            "tests.bench.bench_gpu",
            "protocols=[adaptive,published]",
            *_BENCH[place.device],
            *([f"families=[{','.join(place.families)}]"] if place.families else []),
            f"device={place.device}",
            f"minutes={seconds / 60:.3f}",
            f"data={place.work / 'data'}",
            f"out={place.work / 'bench.json'}",
        ]
    ]


def _bench_left(place: Place) -> bool:
    try:
        return not json.loads((place.work / "bench.json").read_text())["plan"]["complete"]
    except FileNotFoundError:
        return True


def _farm(measured: str, n: int) -> Callable[[Place, float], list[list[str]]]:
    def commands(place: Place, seconds: float) -> list[list[str]]:
        shortened = measured != "power" and place.device == "cuda"
        return [
            [
                "-m",
                "infra.collect",
                f"measure={measured}",
                f"n={place.n or n}",
                "export=false",
                f"device={place.device}",
                f"cluster={place.cluster}",
                f"timeout_s={_TIMEOUT_S}",
                f"data={place.work / 'data'}",
                *([f"families=[{','.join(place.families)}]"] if place.families else []),
                *([f"overrides=[window.max_seconds={_WINDOW_S}]"] if shortened else []),
            ]
        ]

    return commands


def _needs_hardware(place: Place) -> str | None:
    return "nothing of it can be simulated" if place.device == "simulated" else None


def _needs_gpus(place: Place) -> str | None:
    if place.device != "cuda":
        return None
    if place.gpus < 2:
        return "it needs two GPUs, and there is one"
    return None if place.cluster == "local" else "several GPUs need Ray, which is not installed"


STEPS = {
    "test": Step(2, _test, _needs_hardware),
    "calibrate": Step(3, _probes("contexts", "workspaces", "questions"), _needs_hardware),
    "allocator": Step(3, _probes("histories"), _needs_hardware),
    "bench": Step(6, _bench, _needs_hardware, _bench_left, uses_queue=True),
    "collect": Step(8, _farm("runs", 420), uses_queue=True),
    "kernels": Step(3, _farm("kernels", 20), uses_queue=True),
    "pairs": Step(3, _farm("pairs", 40), uses_queue=True),
    "ranks": Step(3, _farm("ranks", 20), _needs_gpus, uses_queue=True),
    "power": Step(2, _farm("power", 4), uses_queue=True),
}
