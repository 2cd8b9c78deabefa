"""The process that runs a script, as a child of `conf.children`, with this project first on the path.

Start reading at `main`; `learn.script.run` has the run.
"""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path

from featurize.trace.light_imports import without_compiler


def main(request_path: str) -> None:
    """Run the script of a request, as `learn.script.estimating` writes it. Children run this function."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    variables = request["command"]["variables"]
    if not variables:  # the wrappers of several ranks import it anyway
        without_compiler()
    from learn.script.containment import DISTRIBUTED, ENVIRONMENT
    from learn.script.run import ScriptRun

    if os.environ.get("WORLD_SIZE") != "1":
        for name in DISTRIBUTED:
            os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT | variables)
    ScriptRun(**request).run()
