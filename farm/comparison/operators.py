"""Compares the operators of the same configurations, traced under both environments.

Start reading at `traced`, then `compare_operators`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import tempfile
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conf.errors import UsageError
from conf.files.identity import mapping_hash
from farm.comparison.pairs import Environment
from farm.comparison.traced_operators import FIGURES
from featurize.configs.features import FEATURES_STAMP
from featurize.device.device_spec import DeviceSpec
from workers.devices import core_count

_A_PROCESS = 16  # configurations that one more process is started for
_SAME = 1e-6  # relative difference of two sums that is rounding
_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True)
class Change:
    """One operator or module over all compared steps, figure by figure; sums of one step of each configuration.

    before, after  calls, launches, moved_mib, gflops, ms, peak_mib, as `farm.comparison.traced_operators` has them
    configurations those in which any figure differs; examples: config hashes, the largest difference in time first
    """

    name: str
    kind: str  # operator category; for a module empty
    before: Mapping[str, float]
    after: Mapping[str, float]
    configurations: int
    examples: tuple[str, ...]

    @property
    def changed(self) -> bool:
        return self.configurations > 0


@dataclass(frozen=True, kw_only=True)
class Operators:
    """Result of comparing the traces of both sides.

    compared   configurations traced on both sides; failed: config hash -> (error before, error after)
    dtypes     dtype -> operators (before, after); peak: kind of memory -> MiB at the peak (before, after), summed
    """

    device: str
    compared: int
    operators: tuple[Change, ...]
    modules: tuple[Change, ...]
    dtypes: Mapping[str, tuple[float, float]]
    peak: Mapping[str, tuple[float, float]]
    failed: Mapping[str, tuple[str | None, str | None]]


def traced(
    environment: Environment,
    code: Path,
    configs: Mapping[str, Mapping[str, Any]],
    spec: DeviceSpec,
    kept: Path,
    progress: Callable[[int, int], None] = lambda completed, total: None,
) -> dict[str, dict[str, Any]]:
    """Config hash -> `summary_of` its step under the environment's torch; what `kept` holds is not traced again.

    `kept` is a file of JSON lines that grows as configurations are traced, so an interrupted call continues there.
    Raises `UsageError` where the environment's Python fails.
    """
    tag = mapping_hash({"code": FEATURES_STAMP, "device": spec.to_mapping()})
    known = {key: record for key, record in _read(kept, tag) if key in configs}
    missing = {key: config for key, config in configs.items() if key not in known}
    if not missing:
        return known
    kept.parent.mkdir(parents=True, exist_ok=True)
    count = max(1, min(core_count(), len(missing) // _A_PROCESS))
    total, lock = len(missing), threading.Lock()
    progress(0, total)
    with open(kept, "a", encoding="utf-8") as file, ThreadPoolExecutor(count) as pool:
        file.write("\n")  # ends a line that a kill may have cut off

        def keep(record: dict[str, Any]) -> None:
            with lock:
                file.write(json.dumps({"tag": tag, **record}) + "\n")
                file.flush()
                missing.pop(record["key"], None)
                known[record.pop("key")] = record
                progress(total - len(missing), total)

        parts = [dict(list(missing.items())[k::count]) for k in range(count)]
        for _ in pool.map(lambda part: _trace(environment, code, part, spec, keep), parts):
            pass  # waits for all, and raises what one has raised
    return known


def _read(kept: Path, tag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        lines = kept.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        return
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:  # cut off by a kill: traced again
            continue
        if isinstance(record, dict) and record.pop("tag", None) == tag and "key" in record:
            yield record.pop("key"), record


def _trace(
    environment: Environment,
    code: Path,
    configs: Mapping[str, Mapping[str, Any]],
    spec: DeviceSpec,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Trace configs in a process of the environment, and keep the record of each as soon as it is there."""
    with contextlib.ExitStack() as stack:
        asked, log = (
            stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")) for _ in range(2)
        )
        lines = [spec.to_mapping(), *({"key": key, "config": config} for key, config in configs.items())]
        asked.writelines(json.dumps(line) + "\n" for line in lines)
        asked.seek(0)
        process = subprocess.Popen(
            [str(environment.python), "-m", "farm.comparison.traced_operators"],
            env={**os.environ, "PYTHONPATH": str(code), "CUDA_VISIBLE_DEVICES": ""},
            stdin=asked,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout is not None
        for line in process.stdout:
            with contextlib.suppress(ValueError):  # cut off: the process was killed, and its exit code says so
                keep(json.loads(line))
        if process.wait():
            log.seek(0)
            error_lines = log.read().strip().splitlines() or [f"exit code {process.returncode}"]
            raise UsageError(f"{environment.text}: its operators cannot be traced: {error_lines[-1]}")


def compare_operators(
    before: Mapping[str, Mapping[str, Any]], after: Mapping[str, Mapping[str, Any]], device: str
) -> Operators:
    """Compare the records of the configurations that both sides have. `device` names the GPU model they are priced on.

    Modules of different configurations are one where their paths differ in numbers only.
    """
    both = [key for key in before if key in after]
    failed = {
        key: (before[key].get("error"), after[key].get("error"))
        for key in both
        if "error" in before[key] or "error" in after[key]
    }
    compared = {key: (before[key], after[key]) for key in both if key not in failed}
    classes = {name: kind for pair in compared.values() for side in pair for name, kind in side["classes"].items()}
    return Operators(
        device=device,
        compared=len(compared),
        operators=_changes(compared, "operators", lambda name: name, classes),
        modules=_changes(compared, "modules", lambda name: re.sub(r"\d+", "*", name), {}),
        dtypes=_sums(compared, "dtypes"),
        peak=_sums(compared, "peak_mib"),
        failed=failed,
    )


def _changes(
    compared: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
    part: str,
    named: Callable[[str], str],
    kinds: Mapping[str, str],
) -> tuple[Change, ...]:
    """Return every operator or module, changed ones first, sorted by difference in time and then in memory moved."""
    totals: dict[str, tuple[dict[str, float], dict[str, float]]] = defaultdict(lambda: (_none(), _none()))
    differing: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for key, pair in compared.items():
        figures_by_name: dict[str, tuple[dict[str, float], dict[str, float]]] = defaultdict(lambda: (_none(), _none()))
        for side, record in enumerate(pair):
            for name, figures in record[part].items():
                for figure in FIGURES:
                    figures_by_name[named(name)][side][figure] += figures[figure]
        for name, (old, new) in figures_by_name.items():
            for side, figures in enumerate((old, new)):
                for figure in FIGURES:
                    totals[name][side][figure] += figures[figure]
            if any(_differ(old[figure], new[figure]) for figure in FIGURES):
                differing[name].append((abs(new["ms"] - old["ms"]), key))
    changes = []
    for name, (old, new) in totals.items():
        largest = sorted(differing[name], key=lambda item: (-item[0], item[1]))
        changes.append(
            Change(
                name=name,
                kind=kinds.get(name, ""),
                before=old,
                after=new,
                configurations=len(largest),
                examples=tuple(key for _, key in largest[:_EXAMPLES]),
            )
        )
    return tuple(sorted(changes, key=_largest_first))


def _largest_first(change: Change) -> tuple[Any, ...]:
    differences = [abs(change.after[figure] - change.before[figure]) for figure in ("ms", "peak_mib", "moved_mib")]
    return (not change.changed, *(-value for value in differences), change.name)


def _differ(old: float, new: float) -> bool:
    return abs(new - old) > _SAME * max(abs(old), abs(new))


def _none() -> dict[str, float]:
    return dict.fromkeys(FIGURES, 0.0)


def _sums(
    compared: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]], part: str
) -> dict[str, tuple[float, float]]:
    sums: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    for pair in compared.values():
        for total, record in zip(sums, pair, strict=True):
            for name, value in record[part].items():
                total[name] += value
    return {name: (sums[0][name], sums[1][name]) for name in sorted(set(sums[0]) | set(sums[1]))}
