"""The bodies of the commands `learn.estimate` and `learn.fit`: settings in, a table or JSON out.

Start reading at `estimate.py`. The functions behind them are `learn.estimate` and `learn.fit`.
"""
