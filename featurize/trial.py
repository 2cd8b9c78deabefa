"""Trial configs as the rest of the project meets them: of mappings, and by their hash.

Start reading at `config_from_mapping`; `featurize.trial_config` has the config itself. Torch-free, so that sampling and
the dispatcher can use it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from conf.errors import UsageError
from conf.identity import canonical_json as canonical_json
from conf.identity import mapping_hash as mapping_hash
from featurize.families import get_family
from featurize.trial_config import ACTIVATIONS as ACTIVATIONS
from featurize.trial_config import MATH_BITS as MATH_BITS
from featurize.trial_config import OPTIMIZER_STATES as OPTIMIZER_STATES
from featurize.trial_config import OPTIMIZERS as OPTIMIZERS
from featurize.trial_config import PRECISIONS as PRECISIONS
from featurize.trial_config import TRAINING_FIELDS as TRAINING_FIELDS
from featurize.trial_config import TrialConfig as TrialConfig
from featurize.trial_config import at_least as at_least
from featurize.trial_config import one_of as one_of


def config_hash(config: TrialConfig) -> str:
    """The trial config's identity, see `mapping_hash`."""
    return mapping_hash(config.to_mapping())


def config_from_mapping(mapping: Mapping[str, Any]) -> TrialConfig:
    """The config that `TrialConfig.to_mapping` wrote. Unknown family or fields raise `UsageError` naming the known."""
    values = dict(mapping)
    if "family" not in values:
        raise UsageError("a trial config needs the key 'family'")
    cls = get_family(values.pop("family")).Config
    fields = {field.name: field for field in dataclasses.fields(cls)}
    unknown = sorted(map(str, set(values) - set(fields)))
    if unknown:
        raise UsageError(f"{cls.family}: unknown {', '.join(unknown)}; known: {', '.join(sorted(fields))}")
    missing = [
        name for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING
    ]  # fmt: skip
    if missing:
        raise UsageError(f"{cls.family}: missing {', '.join(missing)}")
    return cls(**values)
