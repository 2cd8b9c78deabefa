"""DuckDB as this project uses it: in memory for a process's own work, its settings, quoting, and disk errors.

Start reading at `scratch_cursor`: one instance for a process, since an instance for each task would take longer to
start than the task. `disk_errors_named` turns disk errors into `OSError`, which every command prints in one line.
"""
