"""Workers: one per GPU, each running trials in fresh child processes with telemetry. Start reading at `worker.py`."""
