"""Rewrites fitted models that keep LightGBM's text: `python infra/convert_models.py FOLDER [FOLDER ...]`.

A FOLDER is one version, with `meta.json` and `model/`. Goes once the models that come along are rebuilt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from learn.artifact_files import checked, read_json, stamped
from learn.learned.trees import Trees


def convert(folder: Path) -> None:
    """Write `NAME.npz` in place of `NAME.txt` or `NAME-0.txt` and so on, and new checksums."""
    meta = read_json(folder / "meta.json")
    checked(folder, meta)
    texts = sorted((folder / "model").glob("*.txt"))
    for name in sorted({path.stem.partition("-")[0] for path in texts}):
        Trees.load(folder / "model", name).save(folder / "model", name)
    for path in texts:
        path.unlink()
    (folder / "meta.json").write_text(json.dumps(stamped(folder, meta, "meta.json"), indent=1, sort_keys=True))
    print(f"{folder}: {len(texts)} texts rewritten")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        convert(Path(argument))
