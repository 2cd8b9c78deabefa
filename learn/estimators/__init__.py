"""Estimators that learn: their base and table, bounds, trees, the default `hybrid`, and the fit of kernel times.

Start reading at `protocol`, then `hybrid`. Called by fits, judges, peers and estimates; it calls rows and jobs.
"""
