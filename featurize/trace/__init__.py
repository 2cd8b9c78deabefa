"""The trace of a training step: model on meta tensors, steps recorded, kept for later requests.

Start reading at `tracer`. Called by estimates, workers and the farm; it calls families, training and recordings.
"""

from __future__ import annotations

from featurize.trace.light_imports import without_compiler


def import_tracer() -> None:
    """Import what tracing a step needs, but torch's compiler, in a process that traces are forked from.

    Runs no operator and starts no thread.
    """
    without_compiler()
    import torch.fx.experimental.symbolic_shapes  # sympy comes with it, and with a trace's first convolution or product
    import torch.utils._device  # noqa: F401
    import yaml  # noqa: F401  the format of device descriptions

    import featurize.nets.modules
    import featurize.recording.recorder
    import featurize.timing.simulation
    import featurize.trace.tracer  # noqa: F401
    from featurize.training.training_step import preload

    preload()
