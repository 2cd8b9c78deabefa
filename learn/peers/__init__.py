"""Published estimators, a file for each paper, and our own trace beside them.

Start reading at `base.py`; each other module names its source in its docstring.
"""
