"""Trial configs to measure: search spaces, points drawn from them, and which of them are worth a run.

Start reading at `draws`, a pure function of space, seed and index, and `selection`, which ranks candidates. Called by
submissions and nights; it calls `featurize` and `learn`.
"""
