"""Judges of estimators: scores as papers have them, splits without near-copies, figures, plots and reports.

Start reading at `scores` and `evaluate`. Called by fits and benchmarks; it calls rows and estimators.
"""
