"""The trace of a training step: model on meta tensors, steps recorded, kept for later requests.

Start reading at `tracer`. Called by estimates, workers and the farm; it calls families, training and recordings.
"""
