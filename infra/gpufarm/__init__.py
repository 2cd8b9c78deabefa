"""The command `gpufarm`.

Start reading at `__main__.py`. The library is in `learn` (`from learn import estimate`) and its neighbours.
"""
