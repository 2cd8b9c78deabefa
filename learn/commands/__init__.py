"""The bodies of the commands `learn.admit`, `learn.estimate`, `learn.fit` and `learn.plan`; rows of `learn.benchmark`.

Start reading at `estimate.py`. The functions behind them are `learn.estimate` and `learn.fit`.
"""
