"""The bodies of the commands `learn.admit`, `learn.benchmark`, `learn.estimate`, `learn.fit` and `learn.plan`.

Start reading at `estimate.py`. The functions behind them are `learn.estimate` and `learn.fit`.
"""
