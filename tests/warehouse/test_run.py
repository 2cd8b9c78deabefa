"""A run is typed from its worker to its row: one field a column, and JSON in the row alone."""

import datetime
import json

import pyarrow as pa
import pytest

from tests.warehouse.warehouse_rows import ask
from warehouse.files.folder import DataFolder
from warehouse.files.writer import RunWriter
from warehouse.tables.schema import Run, reasons_of

NO_SAMPLES = pa.table({"t_ms": pa.array([], pa.float64())})
RUN = Run(
    run_id="J-000001",
    family="mlp",
    status="ok",
    source="measured",
    config={"family": "mlp", "batch_size": 8},
    quality="suspect",
    quality_reasons={"power_cap": "in 40 % of the window"},
    peak_memory_mib=512.0,
    prepared=False,
    finished_at=datetime.datetime(2026, 11, 22, tzinfo=datetime.UTC),
)


def test_what_was_not_measured_is_null_and_objects_are_json(tmp_path):
    folder = DataFolder.resolve(tmp_path / "a'; echo foo")
    RunWriter(folder).write(RUN, NO_SAMPLES)
    row = ask(
        folder,
        "SELECT config, quality_reasons, peak_memory_mib, prepared, smact, telemetry_missing, telemetry_rows, "
        "schema_version IS NOT NULL FROM runs",
    )[0]
    assert row[0] == '{"batch_size":8,"family":"mlp"}'
    assert reasons_of(row[1]) == RUN.quality_reasons == json.loads(row[1])
    assert row[2:] == (512.0, False, None, None, 0, True)


@pytest.mark.parametrize("text", [None, "", "{", "[1]", "3", "[" * 100_000])
def test_reasons_that_are_no_object_are_none(text):
    assert reasons_of(text) == {}
