"""Estimators that learn: their base and table, bounds, trees and the default `hybrid`.

Start reading at `protocol`, then `hybrid`. Called by fits, judges, peers and estimates; it calls rows and jobs.
"""
