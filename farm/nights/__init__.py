"""Nightly growth: canaries, what to measure next, the run, the landing, the learning step, the report.

Start reading at `cycle`, whose steps `journal` records, so that a killed night resumes. Called by `farm.grow`; it calls
sampling, the dispatcher, `learn` and the warehouse.
"""
