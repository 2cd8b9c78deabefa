"""Fitting the kernel model of `featurize.kernel_model` to measured kernels and steps, and judging it on held-out ones.

Start reading at `fitting.fitted`; `rows` reads what was measured.
"""
