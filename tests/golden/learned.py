"""Predictions of the models that come with the project, and benchmarks of all estimators, on rows made here.

Start reading at `predictions` and `benchmarks`.
"""

import json
from pathlib import Path

from tests.featurize.small_configs import small_config
from tests.golden.commands import invoked
from tests.learn.learn_rows import labels_of, make_configs, write_batch

TARGETS = ("memory", "smact", "smocc")
QUANTILES = (0.05, 0.5, 0.95)
DEVICES = {"A100-SXM4-40GB": 1.0, "V100-SXM2-32GB": 1.7}  # of measured steps, and by how much they are longer
ROWS = 36  # of a benchmark: few, since each estimator is fitted for each fold


def predictions():
    """Yield what each shipped model predicts for each config: of families that it was fitted on, and of others."""
    configs = [
        *make_configs(20, seed=7),
        *(small_config(family, i) for family in ("transformer", "gpt") for i in (0, 1)),
    ]
    for target in TARGETS:
        for number, config in enumerate(configs):
            yield f"{target} {config.family} {number}", lambda t=target, c=config: _predicted(t, c)


def _predicted(target, config):
    from learn.fitting.artifacts import default_artifact
    from learn.job.training_job import of_configs

    prediction = default_artifact(target).estimator.predict(of_configs([config]))
    upper = prediction.upper(0.99)
    return {
        "point": prediction.point[0],
        "quantiles": [prediction.quantile(q)[0] for q in QUANTILES],
        "upper": None if upper is None else upper[0],
        "refusals": prediction.refusals,
        "unfamiliar": prediction.unfamiliar,
        "warnings": prediction.warnings,
    }


def benchmarks():
    """Yield the benchmarks of all estimators on simulated rows, and on measured steps."""
    configs = make_configs(ROWS, seed=3)
    write_batch(Path("simulated"), configs)
    for device, times in DEVICES.items():
        labels = {"step_time_ms": times * labels_of(configs)["step_time_ms"]}
        write_batch(
            Path("measured"),
            configs,
            source="measured",
            job=device,
            device=device,
            statuses=["ok"] * ROWS,
            labels=labels,
        )
    for target in TARGETS[:2]:
        yield from _benchmark(f"simulated {target}", f"target={target}", "data=simulated", "workers=0")
    yield from _benchmark(
        "measured step_time", "target=step_time", "data=measured", "split=leave_one_out", "by=device", "workers=0"
    )


def published(folder):
    """Yield the benchmarks of the published measurements in a folder; none without one."""
    for target in TARGETS[:2] if folder else ():
        yield from _benchmark(target, f"published={folder}", "rows=40", f"target={target}", "data=kept", "workers=0")


def _benchmark(title, *arguments):
    """Yield a benchmark's output, its figures by file and estimator, and its rows, without what they took."""
    out = Path(f"{title.replace(' ', '_')}.json")
    done = invoked("learn.benchmark", [*arguments, f"out={out}"])
    report = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"rows": [], "figures": []}
    yield f"{title}: exit code", {"code": done["code"], "err": done["err"]}
    for figures in report.pop("figures"):
        yield f"{title}: figures of {figures['estimator']} on {figures['file']}", figures
    for number, row in enumerate(report.pop("rows")):
        row["answers"] = {
            name: {key: value for key, value in answer.items() if key != "seconds"}
            for name, answer in row["answers"].items()
        }
        yield f"{title}: row {number}", row
    yield f"{title}: the rest", report
