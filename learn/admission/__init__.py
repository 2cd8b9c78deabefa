"""Decide whether a job may join the jobs of a GPU: the risk that memory runs out, and what it costs each in speed.

Start reading at `admitting.admit`.
"""
