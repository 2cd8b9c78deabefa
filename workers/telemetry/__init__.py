"""Telemetry sensors behind one Protocol, sampled by one thread. Start reading at `sensors.py`."""
