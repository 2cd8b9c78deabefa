"""The fast path: answers from trial configs alone, distilled from an estimator that traces each job.

Start reading at `FastPath.distil` and `FastPath.answer`; `learn.fastpath.fast_features` is what it sees of a config.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Self

import numpy as np

from conf.errors import EnvironmentProblem, UsageError, unknown_name
from featurize.architecture import NVIDIA
from featurize.device_spec import DeviceSpec, device_features, plain_device
from featurize.trial import TrialConfig
from featurize.version import FEATURES_STAMP, is_current
from learn.artifact_files import checked, read_json, stamped
from learn.cases import Case
from learn.estimators import from_space, to_space
from learn.fastpath.fast_bound import Bound, Taught, calibrate
from learn.fastpath.fast_features import Sketch, step_sketch
from learn.fastpath.fast_nets import Nets, train_nets
from learn.targets import get_target

FOLDS = 4  # of each family's cases: what networks say of the one that they were not trained on tells how far off it is
LEAST_CASES = 40  # of a family, with an answer
AT_ONCE = 256  # configs worked on together
_SLACK = 0.05  # of a range's width, beyond which a value is outside


@dataclass(frozen=True)
class FastAnswers:
    """Of n configs. figures: target -> (n,) in the target's unit; upper_mib (n,), None where the teacher had no bound;
    unlike (n,): why a config is unlike all that the fast path was distilled on, no reasons where it is not."""

    figures: Mapping[str, np.ndarray]
    upper_mib: np.ndarray | None
    unlike: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _Fields:
    """How a family's configs are read: the range of each number and the words of each other field."""

    numbers: Mapping[str, tuple[float, float]]
    words: Mapping[str, tuple]

    @classmethod
    def learn(cls, configs: Sequence[TrialConfig]) -> Self:
        numbers, words = {}, {}
        for name in sorted(configs[0].to_mapping().keys() - {"family"}):
            values = [getattr(config, name) for config in configs]
            if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
                numbers[name] = (float(min(values)), float(max(values)))
            else:
                words[name] = tuple(sorted(set(values), key=str))
        return cls(numbers, words)

    def matrix(self, configs: Sequence[TrialConfig]) -> np.ndarray:
        """(n, columns): logarithms of the numbers, and a 1 for the field's own word (none for an unknown one)."""
        numbers = np.array([[getattr(config, name) for name in self.numbers] for config in configs], dtype=float)
        parts = [np.log(numbers + 0.1)]
        for name, known in self.words.items():
            if len(known) > 1:
                place = {word: row for row, word in enumerate(known)}
                rows = [place.get(getattr(config, name), len(known)) for config in configs]
                parts.append(np.eye(len(known) + 1)[rows][:, :-1])
        return np.hstack(parts)

    def unlike(self, config: TrialConfig) -> list[str]:
        """The fields outside what was distilled on."""
        reasons = []
        for name, (low, high) in self.numbers.items():
            value = getattr(config, name)
            slack = _SLACK * (high - low)
            if value is None or not low - slack <= value <= high + slack:
                reasons.append(f"{name} {_plain(value)}: distilled on {_plain(low)} to {_plain(high)}")
        for name, known in self.words.items():
            if getattr(config, name) not in known:
                reasons.append(f"{name} {_plain(getattr(config, name))}: distilled on {', '.join(map(_plain, known))}")
        return reasons


@dataclass(frozen=True)
class _Subject:
    """A case that can be distilled on: a trial config on a device that is described."""

    config: TrialConfig
    spec: DeviceSpec
    key: str

    @classmethod
    def of(cls, case: Case) -> Self:
        if case.config is None or case.spec is None or case.key is None:
            raise ValueError("the fast path is distilled on trial configs and described devices")
        return cls(case.config, case.spec, case.key)


@dataclass(frozen=True)
class _OfFamily:
    """What was learned of one family. bound: of memory, from the nets' last output. memory_mib: the range of the rough
    figure. errors: target -> median, 90th and 99th percentile of the error on cases held out; bounds: how the bound
    compares with the teacher's there."""

    fields: _Fields
    nets: Nets
    bound: Bound | None
    memory_mib: tuple[float, float]
    errors: Mapping[str, Mapping[str, float]]
    bounds: Mapping[str, float]


class FastPath:
    """Small networks, a few for each family, that know what a teacher says of a config's job without tracing it.

    They learn by which factor (ratios: by which term) the teacher's figures differ from a rough model of the step, so
    that they extrapolate with it. How far the teacher's memory bound is above its point is learned too, and calibrated:
    of what the teacher holds possible, 99 % lies below. Memory is no smaller than weights, what the optimizer keeps and
    context; unlike the teacher's, it is not made to grow with the batch size: small steps back are possible.
    """

    def __init__(
        self,
        targets: Sequence[str],
        bounded: bool,
        devices: Mapping[str, str],
        families: Mapping[str, _OfFamily],
        teacher: str,
    ) -> None:
        self.targets, self.bounded = tuple(targets), bounded
        self.teacher = teacher  # the version of the traced steps' features that the teacher answered from
        self.devices = dict(devices)  # names without the vendor -> as they were given
        self._families = dict(families)

    @property
    def families(self) -> tuple[str, ...]:
        return tuple(sorted(self._families))

    @property
    def errors(self) -> dict[str, dict]:
        """family -> target -> `median`, `p90`, `p99` of the error against the teacher on held-out cases: relative where
        the target is judged by its logarithm, absolute for ratios."""
        return {name: {k: dict(v) for k, v in known.errors.items()} for name, known in sorted(self._families.items())}

    @property
    def bounds(self) -> dict[str, dict[str, float]]:
        """family -> the figures of `learn.fastpath.fast_bound.calibrate`; none where the teacher had no bound."""
        return {name: dict(known.bounds) for name, known in sorted(self._families.items())} if self.bounded else {}

    @classmethod
    def distil(cls, cases: Sequence[Case], taught: Mapping[str, Taught], seed: int = 0) -> Self:
        """Learn to say of `cases` (of trial configs) what `taught` (target -> the teacher's answers, in their order)
        says. The order of the cases changes nothing. Raises `UsageError` for a family with fewer than 40 answers."""
        subjects = [_Subject.of(case) for case in cases]
        targets = sorted(taught)
        memory = taught.get("memory")
        bounded = memory is not None and memory.upper is not None
        order = sorted(range(len(cases)), key=lambda i: subjects[i].key)
        families = {}
        for family in sorted({case.family for case in cases}):
            mine = np.array([i for i in order if cases[i].family == family])
            for name, prediction in taught.items():
                if (answered := int(np.isfinite(prediction.point[mine]).sum())) < LEAST_CASES:
                    raise UsageError(
                        f"target={name}, family {family}: {answered} answers to distil, {LEAST_CASES} are needed"
                    )
            own = {name: prediction.rows(mine) for name, prediction in taught.items()}
            families[family] = _learn_family([subjects[i] for i in mine], own, targets, bounded, seed)
        names = sorted({subject.spec.name for subject in subjects})
        return cls(targets, bounded, {plain_device(name): name for name in names}, families, FEATURES_STAMP)

    @staticmethod
    def answers_for(spec: DeviceSpec) -> bool:
        """Whether it was distilled on GPUs of this vendor."""
        return spec.architecture.vendor == NVIDIA

    def answer(self, configs: Sequence[TrialConfig], device: str | DeviceSpec) -> FastAnswers:
        """Figures of each config on one GPU model, in order. Raises `UsageError` for a family or device unknown, and
        for an AMD GPU: the rough model knows cuDNN and CUDA's kernels."""
        spec = _described(device)
        if not self.answers_for(spec):
            raise UsageError(f"method=fast was distilled on NVIDIA GPUs; {spec.name}, an AMD GPU, takes method=full")
        for config in configs:
            if config.family not in self._families:
                raise unknown_name("family of the fast path", config.family, self.families)
        n = len(configs)
        figures = {name: np.full(n, np.nan) for name in self.targets}
        upper = np.full(n, np.nan) if self.bounded else None
        unlike: list[tuple[str, ...]] = [()] * n
        of_device = []
        if plain_device(spec.name) not in self.devices:
            of_device = [f"device {spec.name}: distilled on {', '.join(sorted(self.devices.values()))}"]
        for rows in _parts(configs):
            known = self._families[configs[rows[0]].family]
            asked = [configs[i] for i in rows]
            sketch = step_sketch(asked, spec)
            corrections = known.nets.predict(_inputs(known.fields, asked, sketch, spec))
            place = np.array(rows)
            for column, name in enumerate(self.targets):
                space = get_target(name).space
                figures[name][place] = from_space(to_space(sketch.base[name], space) + corrections[:, column], space)
            rough = sketch.base["memory"]
            if "memory" in figures:
                figures["memory"][place] = np.maximum(figures["memory"][place], sketch.least_mib)
            low, high = known.memory_mib
            for i, config, mib in zip(rows, asked, rough, strict=True):
                reasons = known.fields.unlike(config)
                if not low * (1 - _SLACK) <= mib <= high * (1 + _SLACK):
                    reasons.append(f"about {mib:,.0f} MiB: distilled on {low:,.0f} to {high:,.0f} MiB")
                unlike[i] = (*of_device, *reasons)
            if upper is not None and known.bound is not None:
                log_ratio = known.bound.log_ratio(corrections[:, -1], np.array([len(unlike[i]) for i in rows]))
                upper[place] = figures["memory"][place] * np.exp(log_ratio)
        return FastAnswers(figures, upper, tuple(unlike))

    # ---- on disk

    def save(self, folder: Path) -> None:
        """`fast.json` and `fast-FAMILY.npz` in an existing folder."""
        folder = Path(folder)
        families = {}
        for name, known in self._families.items():
            known.nets.save(folder / f"fast-{name}.npz")
            families[name] = {
                "numbers": {k: list(v) for k, v in known.fields.numbers.items()},
                "words": {k: list(v) for k, v in known.fields.words.items()},
                "bound": None if known.bound is None else asdict(known.bound),
                "memory_mib": list(known.memory_mib),
                "errors": known.errors,
                "bounds": known.bounds,
            }
        state = {
            "features": FEATURES_STAMP,
            "teacher": self.teacher,
            "targets": list(self.targets),
            "bounded": self.bounded,
            "devices": self.devices,
            "families": families,
        }
        (folder / "fast.json").write_text(json.dumps(stamped(folder, state, "fast.json"), indent=1))

    @classmethod
    def load(cls, folder: Path) -> Self:
        """What `save` wrote, answering the same. `EnvironmentProblem` where features of other code distilled it,
        and where it is not what was written (`learn.artifact_files`)."""
        folder = Path(folder)
        state = read_json(folder / "fast.json")
        checked(folder, state, "fast.json")
        if not is_current(state["features"]):
            raise EnvironmentProblem(
                f"{folder}: distilled with other features than this code computes; distil it again"
            )
        families = {
            name: _OfFamily(
                fields=_Fields(
                    {k: tuple(v) for k, v in stored["numbers"].items()},
                    {k: tuple(v) for k, v in stored["words"].items()},
                ),
                nets=Nets.load(folder / f"fast-{name}.npz"),
                bound=None if stored["bound"] is None else Bound(**stored["bound"]),
                memory_mib=tuple(stored["memory_mib"]),
                errors=stored["errors"],
                bounds=stored["bounds"],
            )
            for name, stored in state["families"].items()
        }
        return cls(state["targets"], state["bounded"], state["devices"], families, state["teacher"])


def _learn_family(
    subjects: Sequence[_Subject], taught: Mapping[str, Taught], targets: Sequence[str], bounded: bool, seed: int
) -> _OfFamily:
    fields = _Fields.learn([subject.config for subject in subjects])
    sketches = [step_sketch([subject.config], subject.spec) for subject in subjects]
    inputs = np.vstack([_inputs(fields, [s.config], k, s.spec) for s, k in zip(subjects, sketches, strict=True)])
    rough = {name: np.array([sketch.base[name][0] for sketch in sketches]) for name in sketches[0].base}
    wanted = {
        name: to_space(taught[name].point, get_target(name).space) - to_space(rough[name], get_target(name).space)
        for name in targets
    }
    columns = list(wanted.values())
    if bounded:
        columns.append(taught["memory"].log_ratio)
    labels = np.stack(columns, axis=1)
    fold = np.random.default_rng(seed).permutation(len(subjects)) % FOLDS
    held_out = np.empty(labels.shape)
    for k in range(FOLDS):
        inside = fold != k
        held_out[~inside] = train_nets(inputs[inside], labels[inside], seed).predict(inputs[~inside])
    errors = {
        name: _error(held_out[:, i] - labels[:, i], relative=get_target(name).space == "log")
        for i, name in enumerate(targets)
    }
    bound: Bound | None = None
    bounds: dict[str, float] = {}
    if bounded:
        point = rough["memory"] * np.exp(held_out[:, targets.index("memory")])
        least = np.array([sketch.least_mib[0] for sketch in sketches])
        bound, bounds = calibrate(np.maximum(point, least), held_out[:, -1], taught["memory"])
    range_mib = (float(rough["memory"].min()), float(rough["memory"].max()))
    return _OfFamily(fields, train_nets(inputs, labels, seed), bound, range_mib, errors, bounds)


def _error(gap: np.ndarray, *, relative: bool) -> dict[str, float]:
    gap = gap[np.isfinite(gap)]
    off = np.abs(np.expm1(gap)) if relative else np.abs(gap)
    names = {"median": 0.5, "p90": 0.9, "p99": 0.99}
    return {name: float(np.quantile(off, q)) if len(off) else float("nan") for name, q in names.items()}


def _inputs(fields: _Fields, configs: Sequence[TrialConfig], sketch: Sketch, spec: DeviceSpec) -> np.ndarray:
    of_device = np.broadcast_to(_of_device(spec), (len(configs), len(_of_device(spec))))
    return np.hstack([sketch.values, sketch.replayed, fields.matrix(configs), of_device])


@lru_cache(maxsize=256)
def _of_device(spec: DeviceSpec) -> np.ndarray:
    return np.log(np.array(list({**device_features(spec), "overhead": spec.launch_overhead_us}.values())))


@lru_cache(maxsize=256)
def _described(device: str | DeviceSpec) -> DeviceSpec:
    from featurize.device_spec import describe_device

    return describe_device(device)


def _parts(configs: Sequence[TrialConfig]) -> Iterable[list[int]]:
    """Places of configs of one family, at most `AT_ONCE` together."""
    of_family: dict[str, list[int]] = {}
    for i, config in enumerate(configs):
        of_family.setdefault(config.family, []).append(i)
    for rows in of_family.values():
        for start in range(0, len(rows), AT_ONCE):
            yield rows[start : start + AT_ONCE]


def _plain(value) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value).lower() if isinstance(value, bool) else str(value)
