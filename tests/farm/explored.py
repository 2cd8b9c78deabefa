"""A data folder for the tests of the explorer, apart from `served`, whose other users need none of its libraries."""

import json

from tests.learn.learn_rows import make_configs, write_batch
from tests.warehouse.warehouse_rows import collocations, kernels, run_row, samples
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import Run

HOSTILE = "<script>alert('x')</script>"


def fill_explored(data: DataFolder) -> None:
    """Land runs of every kind, some with hostile texts, and reports of nights, for the explorer's pages."""
    write_batch(data, make_configs(120, seed=4), source="measured", job="measured")
    odd = {"family": "odd", "error": HOSTILE, "status": "crashed", "optimizer": None, "device_name": HOSTILE}
    writer = RunWriter(data)
    writer.write(Run(**run_row(1, **odd)), samples(5, memory_used_mib=[1.0, 5.0, 3.0, 8.0, 2.0]))
    for index in (2, 3):
        paired = Run(**run_row(index, family="paired", group_id="G"))
        both = {"group_id": ["G 1"], "model": ["a & b"], "slowdown": [1.5 + index], "member": [index - 2]}
        writer.write(paired, samples(3), kernels=kernels(3), collocations=collocations(1, **both))
    night = {"cycle": "2026-11-20", "said": {"outcome": "done", "level": "good", "sentence": HOSTILE}}
    night |= {"run": {"runs": 12, "by_status": {"ok": 11, "oom": 1}}}
    night["scores"] = [{"cycle": "2026-11-20", "target": "drama", "estimator": "gbdt", "decision": "promoted"}]
    data.reports.mkdir(exist_ok=True)
    (data.reports / "2026-11-20.json").write_text(json.dumps(night))
    (data.reports / "2026-11-20.html").write_text("<!doctype html><title>the night</title>")
    (data.reports / "2026-11-21.json").write_text("[1")
