"""What rows hold that no code of ours wrote: labels that are no figures, configs that cannot be read or name code.

Start reading at `read_configs`. A bad row costs itself; one sentence counts such rows and names some of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from conf.errors import CommandError
from featurize.own_code import refusal
from featurize.row_config import config_of_one_gpu, printable
from featurize.trial import TrialConfig

_NAMED = 3  # rows that a sentence names
_REASONS = 3  # reasons that a sentence names
_LONGEST_NAME = 200
_MOST_MIB = 2**40
# Texts of a row that are printed, or that rows are told apart by.
_NAMES = ("run_id", "family", "source", "device_name", "status")


@dataclass(frozen=True)
class ReadConfigs:
    """The rows whose config could be read, with it and what they are grouped by, in their order.

    unreadable  reason -> rows that are left out for it; refused: rows whose config names code that is not run
    remarks     a sentence for each of the two, which names some of the rows
    """

    rows: tuple[Mapping, ...]
    configs: tuple[TrialConfig, ...]
    groups: tuple[str, ...]
    modules: tuple[str, ...]
    unreadable: Counter[str]
    refused: int
    remarks: tuple[str, ...]


def is_absurd(row: Mapping, ratio: bool) -> bool:
    """Whether the row's label or device memory is no figure, a name of it is no name, or there is no run id. A ratio
    above 1 by rounding, or a sensor's overshoot, is one."""
    for name in _NAMES:
        text = row[name]
        if not isinstance(text, str) or len(text) > _LONGEST_NAME or not text.isprintable():
            return True
    most = 2.0 if ratio else math.inf
    if (row["label"] is not None and not 0.0 <= row["label"] <= most) or row["label"] == math.inf:
        return True
    return any(row[name] is not None and not 0.0 <= row[name] < _MOST_MIB for name in ("device_memory_mib", "card_mib"))


def read_configs(rows: Sequence[Mapping], trust: Sequence[str], module_of: Callable[[TrialConfig], str]) -> ReadConfigs:
    """Read the config of each row as data (`featurize.row_config`); `trust` names modules whose code may run."""
    from featurize.features import group_key

    kept, configs, groups, modules = [], [], [], []
    unreadable: list[tuple[str, str]] = []  # run_id, reason
    refused: list[tuple[str, str]] = []
    for row in rows:
        try:
            config = config_of_one_gpu(row["config"], trust)
            group, module = group_key(config), module_of(config)
        except CommandError as error:
            unreadable.append((row["run_id"], printable(str(error), 300)))
            continue
        if (reason := refusal(config)) is not None:
            refused.append((row["run_id"], reason))
        kept.append(row)
        configs.append(config)
        groups.append(group)
        modules.append(module)
    remarks = [_sentence(unreadable, "left out, since their configs cannot be read")] if unreadable else []
    if refused:
        remarks.append(_sentence(refused, "used only where their features are stored"))
    return ReadConfigs(
        tuple(kept), tuple(configs), tuple(groups), tuple(modules), Counter(reason for _, reason in unreadable),
        len(refused), tuple(remarks),
    )  # fmt: skip


def named(run_ids: Sequence[str]) -> str:
    """`2 rows (run a, b)`: how many there are, and the first of them."""
    shown = ", ".join(printable(run_id, _LONGEST_NAME) for run_id in run_ids[:_NAMED])
    more = ", ..." if len(run_ids) > _NAMED else ""
    return f"{len(run_ids):,} row{'s' if len(run_ids) != 1 else ''} (run {shown}{more})"


def _sentence(rows: Sequence[tuple[str, str]], problem: str) -> str:
    """How many rows, some of them, and the commonest reasons with their counts."""
    counts = Counter(reason for _, reason in rows)
    shown = "; ".join(f"{reason} ({n})" if n > 1 else reason for reason, n in counts.most_common(_REASONS))
    more = "; ..." if len(counts) > _REASONS else ""
    return f"{named([run_id for run_id, _ in rows])} {problem}: {shown}{more}"
