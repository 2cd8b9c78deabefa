"""Trial configs as data, the search spaces that they are drawn from, and the features that describe them to a learner.

Start reading at `trial.config_from_mapping`; `trial.refusal` decides whether code that a config names may be imported.
A draw from a `space` is a pure function of space, seed and index. Called by all rooms; it calls the families, and, for
features of steps, the timing and the memory of a trace.
"""
