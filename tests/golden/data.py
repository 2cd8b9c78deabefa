"""Payloads of growth nights, comparisons of folders, snapshots and canaries, and a published folder byte by byte.

Start reading at `nights`, `comparisons` and `publication`.
"""

import contextlib
import dataclasses
import hashlib
import itertools
import json
from pathlib import Path

import warehouse
from farm.nights.journal import Journal
from tests.farm.canary_nights import Lab, of, usual, where
from tests.farm.test_compare import CONFIGS, land
from tests.golden.commands import invoked
from tests.golden.record import steady
from tests.warehouse.test_publish import fill
from tests.warehouse.warehouse_rows import run_row, samples
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter

NIGHT = (
    "device=A100-SXM4-40GB",
    "cluster=inline",
    "families=[mlp,cnn]",
    "pool=60",
    "data=grown",
    "learn.targets=[memory]",
    "learn.estimator=lightgbm",
)

NOT_KEPT = ("config", "node", "worker", "device_uuid", "started_at", "finished_at", "host_load")  # of a row


def nights():
    """Yield two nights of growth on a simulated device: output, payload of each step, report, and the rows.

    policy=active is left out: it weighs what a run takes on this machine's clock.
    """
    for night, arguments in (("first", ("n=14", "policy=stratified")), ("second", ("n=8", "policy=coverage"))):
        yield f"{night}: output", invoked("farm.grow", [*NIGHT, *arguments])
        folder = DataFolder.resolve("grown")
        cycle = Journal(folder).cycles()[-1]
        yield f"{night}: outcome", {"outcome": cycle.outcome, "said": cycle.said, "settings": cycle.settings}
        for name, step in cycle.steps.items():
            yield f"{night}: {name}", step.payload
        report = json.loads((folder.reports / "latest.json").read_text(encoding="utf-8"))
        del report["settings"]  # the cycle's
        for name, value in report.items():
            yield f"{night}: report, {name}", value
    with contextlib.closing(warehouse.connect(folder)) as connection:
        rows = connection.execute("SELECT * FROM runs ORDER BY config_hash, finished_at").to_arrow_table().to_pylist()
    for number, row in enumerate(rows):
        yield f"row {number:02}", {key: cell for key, cell in row.items() if cell is not None and key not in NOT_KEPT}


def comparisons():
    """Yield what `farm.compare` and `warehouse.diff` say of two sides, and the verdicts on canaries."""
    before, after, nights = (DataFolder.resolve(name).create() for name in ("before", "after", "nights"))
    crashed = {"status": "crashed", "error": "no kernel", "peak_memory_mib": None, "step_time_ms": None}
    for index, config in enumerate(CONFIGS):
        land(before, index, config)
        changed = {"peak_memory_mib": 1100.0 + index} if index else crashed
        land(after, index, config, torch_version="2.13.0", **changed)
    named = {"device_name": "A100-SXM4-40GB", "torch_version": "2.13", "config_hash": "c0ffee", "smact": 0.5}
    rows = [run_row(index, **named) for index in range(4)]
    more = [run_row(0, **named, optimizer="adam"), run_row(4, **named | {"peak_memory_mib": 3.0, "smact": 0.4})]
    for name, landed in (("a", rows), ("b", [*more, run_row(6, family="mlp", status="oom")])):
        for row in landed:
            RunWriter(nights).write(row, samples())
        take_snapshot(nights, name)
    compared = {"farm.compare": ("before=before", "after=after"), "warehouse.diff": ("before=a", "after=b")}
    for (module, sides), form in itertools.product(compared.items(), ("table", "json")):
        yield f"{module} {form}", invoked(module, [*sides, f"format={form}", "data=nights"])
    lab = Lab(DataFolder.resolve("lab").create())
    changes = {
        "first": usual,
        "steady": where("linear", smact=0.62),
        "slower": where("convolution", step_time_ms=9.0),
        "larger": of(0, 1, peak_memory_mib=2100.0),
        "crashed": of(2, status="crashed", error="no kernel"),
    }
    for name, change in changes.items():
        yield f"canaries {name}", dataclasses.asdict(lab.verdict(lab.night(change)).payload())


def publication():
    """Yield each file of a published snapshot: its hash, and its lines where it is a short text."""
    fill(folder := DataFolder.resolve("filled").create())
    take_snapshot(folder, "s")
    arguments = ["out=set", "data=filled", "snapshot=s", "licence=CC-BY-4.0", "creators=[Ada Lovelace]"]
    yield "output", invoked("warehouse.publish", arguments)
    for path in sorted(Path("set").rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            if path.suffix != ".parquet":  # a text, in which the snapshot's time stands
                lines = steady(content.decode(), Path.cwd())
                content = "\n".join(lines).encode()
            about = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
            yield str(path), about | ({"lines": lines} if path.suffix in (".md", ".json", ".py") else {})
