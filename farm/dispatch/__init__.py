"""The dispatcher: leases tasks from the queue, hands them to workers through an executor, lands their runs.

Start reading at `dispatcher`; `executors` has the Protocol that `ray_cluster` implements. Called by `farm.work`; it
calls the queue, workers and the warehouse's writer.
"""
