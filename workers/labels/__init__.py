"""Labels of a run: means over its window, peaks, energy, and how far they can be trusted.

Start reading at `run_labels`. Called by `workers.worker`; it calls telemetry and a trial's outcome.
"""
