"""The fast path: answers from configs alone, distilled.

Start reading at `fast.py`.
"""
