"""Rows to learn from and to ask about: configs with labels, their records of traced steps, published jobs.

Start reading at `data` and `step_store`. Called by estimators, fits and judges; it calls jobs and the warehouse.
"""
