"""Imports what tracing a job needs, in a process that others are forked from.

Start reading at the list of imports: the module has no other content. It runs no operator and starts no thread.
"""

from __future__ import annotations

from featurize.trace.light_imports import without_compiler

without_compiler()

import learn.estimation.estimating  # noqa: E402
import learn.planning.plans  # noqa: E402, F401
from featurize.training.training_step import preload  # noqa: E402

preload()
