"""Judge estimators: splits, scores, the benchmark's parts and reports.

Start reading at `evaluate.py`.
"""
