"""The durable queue: jobs and tasks in one SQLite file, leased at least once, never lost; its lock, its repair.

Start reading at `jobs`. Called by every command that submits, works or reports; it calls sampling only for configs.
"""
