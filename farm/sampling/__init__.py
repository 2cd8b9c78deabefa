"""Trial configs that are worth a run: forecasts of what they will show, and which of them cover most.

Start reading at `selection`, which ranks candidates that `featurize.configs.draws` drew. Called by submissions and
nights; it calls `featurize` and `learn`.
"""
