"""Fits and their results: artifacts on disk, models of configurations, the kernel model's parameters.

Start reading at `artifacts.save_artifact`; `learn.fit_kernels` uses the fits of kernels, power, links and hosts. Called
by commands, nights and estimates, which read artifacts; it calls judges and estimators.
"""
