"""Loads this data set: the runs, those that ran out of memory, the telemetry of one run, and the longest kernels.

Needs `pip install duckdb`; any program that reads Parquet will do. Run it from anywhere: python load_example.py
"""

from pathlib import Path

import duckdb


def main() -> None:
    folder = Path(__file__).resolve().parent
    with duckdb.connect() as connection:
        for table in ("runs", "telemetry", "kernels", "ranks", "collocations", "jobs"):
            files = [str(path) for path in sorted((folder / table).glob("*.parquet"))]
            connection.read_parquet(files).create_view(table)

        print("runs by family and status")
        query = "SELECT family, status, count(*) FROM runs GROUP BY ALL ORDER BY ALL"
        for family, status, count in connection.execute(query).fetchall():
            print(f"  {family:<14} {status:<8} {count:>8,}")

        # A run that ran out of memory is a label too: "at least the card's memory".
        query = """SELECT family, device_name, median(peak_memory_mib), max(peak_memory_mib) FROM runs
            WHERE status = 'ok' AND peak_memory_mib IS NOT NULL GROUP BY ALL ORDER BY ALL"""
        print("peak memory, MiB: median and largest")
        for family, device, median, largest in connection.execute(query).fetchall():
            print(f"  {family:<14} {device or '-':<24} {median:>10,.0f} {largest:>10,.0f}")

        query = """SELECT run_id, count(*), max(t_ms) / 1000 FROM telemetry JOIN runs USING (run_id)
            GROUP BY run_id ORDER BY count(*) DESC, run_id LIMIT 1"""
        for run_id, readings, seconds in connection.execute(query).fetchall():
            print(f"most telemetry: {run_id}, {readings:,} readings over {seconds:,.1f} s")

        # A row stands for `count` launches; imported kernels belong to no run.
        query = """SELECT operator, sum(duration_us * count) / 1000 FROM kernels
            WHERE run_id IS NOT NULL GROUP BY operator ORDER BY 2 DESC, 1 LIMIT 5"""
        for operator, milliseconds in connection.execute(query).fetchall():
            print(f"kernels of {operator:<32} {milliseconds:>10,.1f} ms in all runs")


if __name__ == "__main__":
    main()
