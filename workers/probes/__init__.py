"""Measurements made once on a GPU: contexts, workspaces, allocator histories, and questions that only hardware answers.

Start reading at `children.measure_all`; each of `contexts`, `workspaces`, `histories` and `questions` has a `measure`.
"""
