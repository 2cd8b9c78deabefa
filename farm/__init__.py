"""The farm: samples trial configs, queues them durably, hands them to workers, lands their runs.

Start reading at `farm.queue.jobs` (the queue) and `featurize.configs.space` (the configs in it).
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if sys.argv[:1] == ["-m"]:  # `python -m` puts the working folder first on the path
    runpy.run_path(str(Path(__file__).parents[1] / "conf" / "cli" / "own_packages.py"), run_name="__main__")
