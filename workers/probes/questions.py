"""Questions that only hardware answers: TF32 beside half precision, GPM's first sample, NVML's and MPS's memory.

Start reading at `measure`; each question has figures, and an answer in one sentence that is derived from them.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import first_line
from conf.plain_text import count_of
from conf.units import MIB
from workers.probes.children import Measurement, ProbeResult, Row, first_gpu, measure_all, memory_reading

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_HELD_MIB = 2048
_PATIENCE_S = 10.0
_CLIENTS_MIB = (1024, 2048)
_CLIENT_S = 40.0
_EQUAL_SHARE = 0.05  # relative difference below which two figures count as equal
_TIMED = 20  # repetitions
_UNKNOWN = "unknown"  # name of a program whose pid does not exist here
_BUSY_S, _GPM_S = 1.0, 3.0  # load before GPM's sensor is made, longer than GPM averages; time of reading it


def measure(folder: Path, device: str, seconds_left: Callable[[], float]) -> ProbeResult:
    """Measure the missing files in FOLDER/questions, the input of `ANSWERS`."""
    measurements = [Measurement(name=name, function=f"workers.probes.questions:{name}") for name in ANSWERS]
    return measure_all(folder / "questions", measurements, device, seconds_left)


# ---- TF32 in operators that autocast leaves in fp32, and in convolutions of half precision


def tf32_under_half(device_uuid: str) -> Iterator[Row]:
    """Yield time in ms of a convolution and a product, with TF32 allowed and refused.

    `inside` is the operator's type. For fp32 the operator runs in a nested region with autocast off, as in scripts.
    """
    import torch

    from featurize.operators.torch_releases import allow_tf32

    device = first_gpu()
    x = torch.randn(32, 128, 56, 56, device=device)
    convolution = torch.nn.Conv2d(128, 128, 3, padding=1, device=device)
    matrix = torch.randn(4096, 4096, device=device)
    operators: dict[str, Callable[[], Any]] = {
        "conv2d": lambda: convolution(x).sum().backward(),
        "mm": lambda: matrix @ matrix,
    }
    for half in (torch.float16, torch.bfloat16):
        for inside in (half, torch.float32):
            for operator, call in operators.items():
                for allowed in (True, False):
                    allow_tf32(matmul=allowed, cudnn=allowed)
                    with torch.autocast("cuda", dtype=half), torch.autocast("cuda", dtype=half, enabled=inside is half):
                        yield {
                            "autocast": _short(half),
                            "operator": operator,
                            "inside": _short(inside),
                            "tf32_allowed": allowed,
                            "ms": _time_ms(call),
                        }


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _time_ms(call: Callable[[], Any]) -> float:
    import torch

    times: list[float] = []
    for number in range(_TIMED + 3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(begin.elapsed_time(end))
    return round(statistics.median(times), 4)


def answer_tf32(rows: Sequence[Row]) -> str:
    """Return for each kind of operator whether refusing TF32 changes its time."""
    times: dict[tuple[str, str], dict[bool, list[float]]] = {}
    for row in rows:
        by_flag = times.setdefault((row["inside"], row["operator"]), {True: [], False: []})
        by_flag[row["tf32_allowed"]].append(row["ms"])
    parts = []
    for (inside, operator), by_flag in times.items():
        allowed, refused = statistics.mean(by_flag[True]), statistics.mean(by_flag[False])
        changes = abs(refused - allowed) > _EQUAL_SHARE * allowed
        effect = f"{refused / allowed:.2f} times as long without TF32" if changes else "the same without TF32"
        parts.append(f"{inside} {operator} takes {allowed:.3f} ms, {effect}")
    return "Under autocast, " + "; ".join(parts) + "."


# ---- GPM's first sample


def gpm_first_sample(device_uuid: str) -> Iterator[Row]:
    """Yield GPM's readings while the GPU is busy, from the sensor's creation on."""
    import torch

    from workers.telemetry.nvml import GpmSensor
    from workers.telemetry.sensors import SensorUnavailable, WatchTarget

    matrix = torch.randn(8192, 8192, device=first_gpu(), dtype=torch.bfloat16)
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            for _ in range(10):
                matrix @ matrix
            torch.cuda.synchronize()

    loading = threading.Thread(target=load)
    loading.start()
    try:
        time.sleep(_BUSY_S)
        begin = time.monotonic()
        sensor = GpmSensor(WatchTarget(device_uuid=device_uuid, pid=os.getpid()))
        while time.monotonic() - begin < _GPM_S:
            try:
                samples = sensor.sample()
            except SensorUnavailable as problem:
                yield {"after_ms": round((time.monotonic() - begin) * 1000, 1), "smact": None, "problem": str(problem)}
                return
            for sample in samples:
                yield {
                    "after_ms": round((time.monotonic() - begin) * 1000, 1),
                    "smact": sample.values.get("smact"),
                    "drama": sample.values.get("drama"),
                    "problem": None if sample.values else ", ".join(sample.reasons),
                }
            time.sleep(sensor.period_s)
        sensor.close()
    finally:
        stop.set()
        loading.join()


def answer_gpm(rows: Sequence[Row]) -> str:
    """Return whether the first reading resembles the later ones, and when the first one above 0 came."""
    known = [row for row in rows if row["smact"] is not None]
    above = next((row for row in known if row["smact"] > 0), None)
    if above is None:
        return f"GPM gave no SM activity above 0 in {count_of(len(rows), 'reading')}."
    steady = statistics.median(row["smact"] for row in known[len(known) // 2 :])
    first = rows[0]["smact"]
    usable = first is not None and abs(first - steady) <= max(_EQUAL_SHARE * steady, 0.02)
    shown = "nothing" if first is None else f"{first:.3f}"
    return (
        f"The first reading is {'' if usable else 'not '}usable: it gives {shown} where later ones give {steady:.3f}; "
        f"the first above 0 came after {above['after_ms']:.0f} ms."
    )


# ---- NVML's memory of a process and of the card


def nvml_process_and_card(device_uuid: str) -> Iterator[Row]:
    """Yield NVML's readings while a process holds memory."""
    before_mib = memory_reading(device_uuid)["card_mib"]
    with _holding(device_uuid, [_HELD_MIB]) as (held,):
        yield {**held, "card_before_mib": before_mib}


def answer_nvml(rows: Sequence[Row]) -> str:
    """Return the card's growth, and NVML's charge to the process."""
    (row,) = rows
    growth_mib = row["card_mib"] - row["card_before_mib"]
    process_mib = row["process_mib"]
    charged = f"{process_mib:,.1f} MiB" if process_mib is not None else f"nothing ({row['reason']})"
    return f"The card's memory grows by {growth_mib:,.1f} MiB; NVML charges the process {charged}."


# ---- NVML's charges under MPS


def peak_memory_under_mps(device_uuid: str) -> Iterator[Row]:
    """Yield the processes that NVML lists while two clients of an MPS server hold memory, as each client reads them."""
    from workers.trial.running import MpsDaemon

    daemon = MpsDaemon({"CUDA_VISIBLE_DEVICES": device_uuid})
    try:
        os.environ.update(daemon.environment)  # the clients inherit it
        with _holding(device_uuid, _CLIENTS_MIB) as clients:
            yield from clients
    finally:
        daemon.close()


def answer_mps(rows: Sequence[Row]) -> str:
    """Return whether NVML charges a client's memory to the client or to the server."""
    if all(_charged_mib(row) >= row["held_mib"] for row in rows):
        return "Under MPS NVML charges each client its own memory, so peak_memory_mib is the trial's own."
    total_mib = sum(row["held_mib"] for row in rows)
    listed = {name: mib or 0 for row in rows for name, mib in row["listed_mib"].items()}
    clients = {str(row["pid"]) for row in rows}
    others = {name: mib for name, mib in listed.items() if name.split()[0] not in clients}
    if any(mib >= total_mib and not name.endswith(_UNKNOWN) for name, mib in others.items()):
        return "Under MPS NVML charges all clients' memory to one process, so peak_memory_mib is not the trial's own."
    if any(name.endswith(_UNKNOWN) for name in others):
        return "Under MPS NVML lists pids of another pid namespace, so these figures do not say whom it charges."
    return "Under MPS NVML lists no process with the clients' memory, so peak_memory_mib comes from the allocator."


def _charged_mib(client: Row) -> float:
    listed = (mib for name, mib in client["listed_mib"].items() if name.split()[0] == str(client["pid"]))
    return client["process_mib"] or next(listed, None) or 0.0


# ---- processes that hold memory


@contextlib.contextmanager
def _holding(device_uuid: str, sizes_mib: Sequence[int]) -> Iterator[list[Row]]:
    """Start processes that hold memory on the GPU, yield their readings, and end them afterwards.

    Raises:
        RuntimeError: A process ended early, or did not answer in time.
    """
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    try:
        for size_mib in sizes_mib:
            ours, theirs = context.Pipe()
            process = context.Process(target=hold, args=(theirs, device_uuid, size_mib))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for word in ("hold", "read"):  # all hold their memory before the first one reads
            for pipe in pipes:
                pipe.send(word)
            answers = [_answer(pipe) for pipe in pipes]
        yield answers
    finally:
        for pipe in pipes:
            pipe.close()  # this ends the process
        for process in processes:
            process.join(_PATIENCE_S)
            process.kill()
            process.join()


def _answer(pipe: Connection) -> Row:
    try:
        answer: Row = pipe.recv() if pipe.poll(_CLIENT_S) else {"problem": f"no answer in {_CLIENT_S:.0f} s"}
    except EOFError:
        answer = {"problem": "the process ended"}
    if "problem" in answer:
        raise RuntimeError(f"a process that holds memory: {answer['problem']}")
    return answer


def hold(pipe: Connection, device_uuid: str, size_mib: int) -> None:
    """Hold memory on the GPU, read NVML's lists, and end with the pipe; send a failure as `problem`."""
    import torch

    try:
        pipe.recv()
        held = torch.ones(size_mib * MIB // 4, device=first_gpu())
        torch.cuda.synchronize()
        pipe.send({})
        pipe.recv()
        pipe.send(
            {
                "pid": os.getpid(),
                "held_mib": held.numel() * 4 / MIB,
                "reserved_mib": torch.cuda.memory_reserved() / MIB,
                "listed_mib": _listed_mib(device_uuid),
                **memory_reading(device_uuid),
            }
        )
        pipe.recv()
    except EOFError:
        return
    except RuntimeError as error:
        pipe.send({"problem": first_line(error)})


def _listed_mib(device_uuid: str) -> dict[str, float | None]:
    """Return `PID PROGRAM` -> MiB for the compute processes and MPS clients that NVML lists."""
    from workers.telemetry.nvml import find_gpu, open_nvml

    nvml = open_nvml()
    handle = find_gpu(nvml, device_uuid).device
    listed: dict[str, float | None] = {}
    for list_processes in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetMPSComputeRunningProcesses):
        with contextlib.suppress(nvml.NVMLError):
            for process in list_processes(handle):
                used = process.usedGpuMemory
                listed[f"{process.pid} {_program(process.pid)}"] = None if used is None else used / MIB
    return listed


def _program(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return _UNKNOWN


# Question -> function that derives the answer from its figures.
ANSWERS: Mapping[str, Callable[[Sequence[Row]], str]] = {
    "tf32_under_half": answer_tf32,
    "gpm_first_sample": answer_gpm,
    "nvml_process_and_card": answer_nvml,
    "peak_memory_under_mps": answer_mps,
}
