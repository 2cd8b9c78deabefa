"""Chooses trial configs that are worth a run: forecasts their figures, and finds those that cover most.

Start reading at `selection`, which ranks candidates that `featurize.configs.space` drew. Called by submissions and
nights; it calls `featurize` and `learn`.
"""
