"""Parts of nightly growth: the journal, canaries, what to measure next, the report.

Start reading at `journal`, which records the steps of a night, so that a killed one resumes. Called by `farm.grow`; it
calls sampling, `learn` and the warehouse.
"""
