"""Estimators of peak memory that learn nothing: published formulas and analyses, and our own trace.

Start reading at `base.py`; each other module is one estimator, its source named in its docstring.
"""
