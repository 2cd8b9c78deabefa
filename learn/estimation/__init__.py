"""How one job's estimate is put together and shown.

Start reading at `answers.py`.
"""
