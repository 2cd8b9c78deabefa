"""The farm: samples trial configs, queues them durably, hands them to workers, lands their runs.

Start reading at `farm.jobs` (the queue) and `farm.sampling` (what is put into it).
"""
