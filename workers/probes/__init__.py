"""Measurements made once on a GPU: contexts, workspaces and allocator histories.

Start reading at `children.measure_all`; each of `contexts`, `workspaces` and `histories` has a `measure`.
"""
