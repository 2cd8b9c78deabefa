"""Changes of kernels' times between two sides of `warehouse.diff`: the same kernel on the same shapes, timed again.

Start reading at `kernel_shifts`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from warehouse.reader import WarehouseConnection

# What two rows have in common that time the same work on the same GPU model and software.
_SAME = (
    "source", "device_name", "torch_version", "cuda_version", "cudnn_version", "phase", "operator", "dims", "dtype",
    "kernel", "timing",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KernelDifference:
    """Difference in the time of one operator's kernels that were timed again.

    Shifts are of median durations, relative to before.
    """

    operator: str
    device_name: str | None
    kernels: int  # kernels on inputs of the same shapes, on the same software
    median_shift: float
    largest_shift: float  # by its absolute value
    beyond: int  # kernels whose shift is beyond the tolerance


def kernel_shifts(
    before: WarehouseConnection, after: WarehouseConnection, tolerance: float
) -> tuple[KernelDifference, ...]:
    """Compare rows of `kernels` that are new in `after` with those of `before` that time the same kernel.

    Args:
        before, after: Connections to the two sides.
        tolerance: Largest relative shift that does not count as beyond.
    """
    with contextlib.closing(duckdb.connect()) as joined:
        joined.register("before", _kernels(before))
        joined.register("after", _kernels(after))
        return tuple(_shifts(joined, tolerance))


def _kernels(connection: WarehouseConnection) -> pa.Table:
    columns = ", ".join(("kernel_row", "duration_us", *_SAME))
    return connection.sql(f"SELECT {columns} FROM kernels WHERE duration_us > 0").to_arrow_table()


def _shifts(joined: duckdb.DuckDBPyConnection, tolerance: float) -> Iterator[KernelDifference]:
    keys = ", ".join(_SAME)
    matched = " AND ".join(f"old.{name} IS NOT DISTINCT FROM new.{name}" for name in _SAME)
    typical = f"SELECT {keys}, median(duration_us) AS typical_us FROM {{}} GROUP BY {keys}"
    new_rows = "(SELECT * FROM after ANTI JOIN before USING (kernel_row))"
    groups = joined.execute(
        f"""WITH shifts AS (
            SELECT new.operator, new.device_name, new.typical_us / old.typical_us - 1 AS shift
            FROM ({typical.format("before")}) AS old JOIN ({typical.format(new_rows)}) AS new ON {matched}
        )
        SELECT operator, device_name, count(*), median(shift), arg_max(shift, abs(shift)),
            count(*) FILTER (abs(shift) > {tolerance})
        FROM shifts GROUP BY ALL ORDER BY ALL"""
    ).fetchall()
    for operator, device, kernels, median, largest, beyond in groups:
        yield KernelDifference(
            operator=operator, device_name=device, kernels=kernels, median_shift=median, largest_shift=largest,
            beyond=beyond,
        )  # fmt: skip


def kernel_rows(shifts: Sequence[KernelDifference]) -> list[tuple[str, ...]]:
    """Return the cells of a table: operator, device, kernels, median, largest, beyond."""
    return [
        (
            shift.operator, shift.device_name or "-", f"{shift.kernels:,}", f"{shift.median_shift:+.1%}",
            f"{shift.largest_shift:+.1%}", f"{shift.beyond:,}",
        )
        for shift in shifts
    ]  # fmt: skip
