"""Rows to fit on and to judge by: configs with labels, records of their traced steps, published jobs.

Start reading at `data` and `step_store`. Called by estimators, fits and judges; it calls jobs and the warehouse.
"""
