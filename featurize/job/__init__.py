"""A training job as its user states it: config fields, training settings, the layout over GPUs. Torch-free.

Start reading at `training_settings` and `layout`. Called by every other folder; it calls `conf` alone.
"""
