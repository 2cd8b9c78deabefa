"""A trial: its server, its process and socket, its reports, and its outcome.

Start reading at `body` (inside the trial) and `running` (beside it). Called by `workers.worker`; it calls devices and
telemetry.
"""
