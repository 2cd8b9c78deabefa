"""The model card of the models that come with the project: what they were fitted on, how good they are, where not.

Start reading at `write_card`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_METRICS = {
    "accuracy": "accuracy in the published bins",
    "macro_f1": "macro F1",
    "median_relative_error": "median relative error",
    "p90_relative_error": "90th percentile of the relative error",
    "mean_absolute_error": "mean absolute error",
    "underestimates": "share underestimated",
    "coverage": "labels under the 99 % bound",
    "bound_excess": "bound over label, median excess",
}

_OWN = """- **And on** {measured:,} runs that the farm measured (`datasets/README.md`). Rows by device: {devices}.
  What follows in this list is said of the published rows."""


def write_card(path: Path, metas: Mapping[str, Mapping]) -> None:
    """Write the card; `metas` are the artifacts' `meta.json` by target."""
    first = next(iter(metas.values()))
    measured = first["rows"]["source"].get("measured", 0)
    devices = ", ".join(f"{name} {count:,}" for name, count in first["rows"]["device"].items())
    environment = ", ".join(f"{name} {version}" for name, version in sorted(first["environment"].items()) if version)
    timm = " and timm models" if any("timm" in meta["rows"]["family"] for meta in metas.values()) else ""
    lines = [
        "# Model card: the models that come with the project",
        "",
        "Estimators of one training job's peak GPU memory, SM activity (`smact`) and SM occupancy (`smocc`), used by",
        "`learn.estimate` where you have fitted none of your own. Written by",
        "`python -m learn.build_defaults`, which makes them anew.",
        "",
        f"- **Estimator**: `{first['estimator']}` (`learn/learned/hybrid.py`), seed {first['seed']}.",
        f"- **Made with**: {environment}.",
        f"- **Features**: version `{first['feature_version']}`.",
        "- **Trained on**: published measurements of one A100-SXM4-40GB of a DGX Station A100, PyTorch 2.4.1,",
        f"  CUDA 12.2, fp32: GPUMemNet's sets (arXiv 2602.17817){timm}. No row of them comes along.",
        *([_OWN.format(measured=measured, devices=devices)] if measured else []),
        "- **Not measured**: other GPUs, half precision, other optimizers than Adam (timm: taken for SGD with",
        "  momentum), `torch.compile`, several GPUs. Estimates for these carry warnings, the trace's",
        "  figure, and a bound by causes.",
        "- **Utilization** was measured on MLPs and CNNs only, means over a whole run with its input pipeline.",
        "- `drama`, step time and power were in none of the files: the traced step's kernels answer for them.",
        "",
        "## Rows",
        "",
        "| target | rows by family | out of memory |",
        "|---|---|---|",
    ]
    for target, meta in metas.items():
        families = ", ".join(f"{name} {n:,}" for name, n in meta["rows"]["family"].items())
        lines.append(f"| {target} | {families} | {meta['rows']['censored']:,} |")
    lines += [
        "",
        "## Held-out figures",
        "",
        "30 % of the rows, whole groups of near-copies held out (3-fold mean in brackets).",
        "",
    ]
    lines += [f"| | {' | '.join(metas)} |", f"|---|{'---|' * len(metas)}"]
    for name, heading in _METRICS.items():
        lines.append(f"| {heading} | {' | '.join(_cell(name, meta) for meta in metas.values())} |")
    lines += ["", "`learn.benchmark` says how they compare with published estimators, family by family."]
    path.write_text("\n".join(lines) + "\n")


def _cell(name: str, meta: Mapping) -> str:
    values = meta["metrics"].get(name)
    if values is None or values["test"] is None:
        return "–"
    if name == "mean_absolute_error":
        unit = "" if meta["unit"] == "ratio" else f" {meta['unit']}"
        digits = 4 if meta["unit"] == "ratio" else 0
        return f"{values['test']:.{digits}f}{unit}"
    cv = "" if values["cv_mean"] is None else f" ({values['cv_mean']:.1%})"
    return f"{values['test']:.1%}{cv}"
