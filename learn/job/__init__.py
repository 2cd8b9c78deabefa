"""A training job, the input of an estimate: model, batch, settings, and its traced step.

Start reading at `training_job.TrainingJob` and `traced`. Called by every other folder; it calls `featurize` alone.
"""
