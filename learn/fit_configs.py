"""`python -m learn.fit_configs FOLDER`: refit the models of `method=fast`, on traces of 3,360 configurations."""

from __future__ import annotations

import sys
from pathlib import Path

from learn.estimation.fast_estimates import fit_config_models

if __name__ == "__main__":
    fit_config_models(
        Path(sys.argv[1]),
        progress=lambda step, completed, total: print(f"{step}: {completed:,} of {total:,}", end="\r"),
    )
