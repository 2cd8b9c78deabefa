"""Models of configurations alone (`method=fast`) that learn what full estimates say of sampled configurations.

Start reading at `fit_config_model`. `drawn_cases` samples, and `labelled_rows` labels what was traced with the figures
of a full estimate: of a target's model, and of the trace where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from conf.errors import UsageError
from featurize.configs.features import group_key
from featurize.configs.space import Limits, Space, default_space, parse_space, sample_range
from featurize.configs.trial import TrialConfig
from featurize.device.device_spec import DEFAULT_DEVICE
from featurize.job.training_settings import FITTED_OPTIMIZERS, PRECISIONS
from learn.estimators.protocol import LEVEL, Estimator, conformal_score, records_of
from learn.estimators.trees import LightGBMEstimator
from learn.fitting.artifacts import BOUND, meta_of_fit
from learn.job.training_job import Case
from learn.judging.evaluate import hold_out
from learn.judging.scores import errors_of
from learn.rows.data import LabelledRow, Rows, get_target, module_of
from learn.rows.step_store import StepStore

FAMILIES = ("cnn", "mlp", "transformer")
# GPU models of the sampled configurations: more would spread them thinner.
DEVICES = (
    "A100-SXM4-40GB",
    "B200-SXM-180GB",
    "H100-SXM5-80GB",
    "H200-SXM-141GB",
    "RTX-3090",
    "RTX-4090",
    "RTX-5090",
    "T4",
    "V100-SXM2-32GB",
)
ROUNDS = 120  # trees of a model; all those of method=fast take less than 1.5 MB
MOST_MIB = 120 * 1024  # limit of `featurize.job.layers.rough_memory_mib` in the wider spaces
# Instead of what conf/arch says: a scheduler's jobs differ more in how they are trained than a published sweep does. A
# value listed twice is drawn twice as often.
_WIDER: Mapping[str, Any] = {
    "batch_size": {"low": 1, "high": 1024},
    "optimizer": ["adam", *FITTED_OPTIMIZERS],
    "precision": ["fp32", "fp32", *PRECISIONS],
    "activation_checkpointing": [False, False, False, True],
    "cudnn_benchmark": [False, False, False, True],
    "channels_last": [False, False, False, True],
    "softmax": [False, True],
    "use_dropout": [False, True],
    "growth_rate": {"low": 12, "high": 64},
}


def drawn_cases(n: int, seed: int) -> tuple[Case, ...]:
    """Return about n cases in the usual training loop, as many of each family: half from its own space, half from wider
    ones; half on the measured GPU model, the others in turn."""
    others = [name for name in DEVICES if name != DEFAULT_DEVICE]
    each = -(-n // len(FAMILIES) // 4)
    cases = []
    for family in FAMILIES:
        own, *wider = _spaces(family)
        drawn = [*sample_range(own, seed, 0, 2 * each)]
        for space in wider:
            drawn += sample_range(space, seed, 0, each, limits=Limits(max_memory_mib=MOST_MIB))
        for place, config in enumerate(drawn):
            cases.append(Case(config, others[place // 2 % len(others)] if place % 2 else DEFAULT_DEVICE, True))
    return tuple(cases)


def _spaces(family: str) -> Iterator[Space]:
    """Yield the family's own search space, and a wider one: drawn evenly, and on a logarithmic scale."""
    own = default_space(family) or {}
    yield parse_space(family, own)
    wider = {name: _WIDER.get(name, spec) for name, spec in own.items()}
    for scale in ("uniform", "log"):
        scaled = {name: {**spec, "scale": scale} if isinstance(spec, dict) else spec for name, spec in wider.items()}
        yield parse_space(family, scaled)


def labelled_rows(
    cases: Sequence[Case], steps: StepStore, models: Mapping[str, Estimator], names: Iterable[str]
) -> dict[str, Rows]:
    """Return name -> rows, labelled with the figures of the models and of the trace. Cases that cannot be traced are
    left out.

    Args:
        cases: Cases to label.
        steps: Store of their traced steps.
        models: Target -> its estimator.
        names: Targets, and `BOUND` for memory's 99 % bound. Raises `KeyError` for one that has no labels.
    """
    records, _ = records_of(cases, steps)
    traced = [cases[place] for place in records]
    names_of_trace = ("job_step_time_ms", "job_input_share", "job_priced_drama")
    of_trace = [[record.values[name] for name in names_of_trace] for record in records.values()]
    step_ms, input_share, drama = np.array(of_trace).T
    # As in the farm's own trials: a step of the usual loop runs the same kernels, and waits for its input before.
    labels = {"drama": np.minimum(drama / (1 - input_share), 1.0), "step_time": step_ms * (1 - input_share)}
    for target, model in models.items():
        prediction = model.predict(traced, steps)
        labels[target] = prediction.point
        if target == "memory" and (upper := prediction.upper(LEVEL)) is not None:
            labels[BOUND] = upper

    def row(place: int, label: float) -> LabelledRow:
        case = traced[place]
        assert case.config is not None and case.spec is not None, "it was drawn, on a GPU model of conf/device"
        return LabelledRow(
            run_id=f"row-{place:06d}",
            case=case,
            label=label,
            family=case.family,
            source="simulated",
            device=case.device,
            device_memory_mib=case.spec.memory_mib,
            card_mib=case.spec.memory_mib,
            group=group_key(case.config),
            module=module_of(case.config),
        )

    return {
        name: Rows(
            get_target("memory" if name == BOUND else name),
            tuple(row(place, label) for place, label in enumerate(labels[name].tolist()) if np.isfinite(label)),
        )
        for name in names
    }


def fit_config_model(name: str, rows: Rows, seed: int) -> tuple[LightGBMEstimator, dict[str, Any]]:
    """Fit a target's model, or `BOUND`'s, to all rows; return it with its `meta.json`.

    Its errors, and the `above` by which the bound exceeds its own figure, are of a fit without the groups judged.
    Raises `UsageError` for rows of which a family's are too few to hold some out.
    """

    def fitted(known: Rows) -> LightGBMEstimator:
        estimator = LightGBMEstimator(seed)
        estimator.rounds, estimator.times_rough = ROUNDS, True
        return estimator.fit(known)

    train, test = map(rows.subset, hold_out(rows, np.unique(rows.family, return_inverse=True)[1], seed))
    if lacking := [family for family in FAMILIES if family not in test.family]:
        raise UsageError(f"no rows of {', '.join(lacking)} are held out, so the errors of {name} are unknown")
    point = fitted(train).predict(test.cases).point
    of_family = {family: test.family == family for family in FAMILIES}
    estimator = fitted(rows)
    meta: dict[str, Any] = {
        **meta_of_fit(estimator, rows, seed, datetime.now(UTC), test=len(test)),
        "errors": {
            family: _median_and_p90(test.label[mask], point[mask], rows.target.space)
            for family, mask in of_family.items()
        },
        "known": {family: _known(rows.subset(rows.family == family).configs) for family in FAMILIES},
    }
    if name == BOUND:
        times = test.label / point
        meta["above"] = {
            family: round(conformal_score(np.sort(times[mask]), LEVEL), 4) for family, mask in of_family.items()
        }
    return estimator, meta


def _median_and_p90(label: np.ndarray, estimate: np.ndarray, space: str) -> dict[str, float]:
    errors = errors_of(label, estimate, space)
    assert errors.median is not None and errors.p90 is not None, "each family has rows held out"
    return {"median": round(errors.median, 4), "p90": round(errors.p90, 4)}


def _known(configs: Sequence[TrialConfig | None]) -> dict[str, list[Any]]:
    """Return field -> the least and the greatest number, or all words, of one family's configurations."""
    mappings = [config.to_mapping() for config in configs if config is not None]
    known: dict[str, list[Any]] = {}
    for name in sorted(mappings[0].keys() - {"family"}):
        values = [mapping[name] for mapping in mappings]
        numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in values)
        known[name] = [min(values), max(values)] if numbers else sorted(set(values), key=str)
    return known
