"""A trial: its server, its process and its socket, what it reports, and how it ended.

Start reading at `body` (inside the trial) and `server_client` (beside it). Called by `workers.worker`; it calls devices
and telemetry.
"""
