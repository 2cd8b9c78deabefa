"""Plans of a job on several GPUs: which layouts fit, and which of them is the quickest.

Start reading at `plans.plan`; `meshes` lists the layouts, `search` tries batches, `rows` has the result.
"""
