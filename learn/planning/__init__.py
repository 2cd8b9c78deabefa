"""Plans of a job on several GPUs: the layouts that fit, and the fastest among them.

Start reading at `plans.plan`; `meshes` lists the layouts.
"""
