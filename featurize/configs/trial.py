"""Trial configs as the rest of the project meets them: of mappings, and by their hash.

Start reading at `config_from_mapping`; `featurize.job.trial_config` has the config itself. Torch-free, so that sampling
and the dispatcher can use it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from conf.errors import UsageError
from conf.files.identity import canonical_json as canonical_json
from conf.files.identity import mapping_hash as mapping_hash
from featurize.families import get_family
from featurize.job.trial_config import ACTIVATIONS as ACTIVATIONS
from featurize.job.trial_config import FITTED_OPTIMIZERS as FITTED_OPTIMIZERS
from featurize.job.trial_config import OPTIMIZERS as OPTIMIZERS
from featurize.job.trial_config import PRECISIONS as PRECISIONS
from featurize.job.trial_config import TrialConfig as TrialConfig


def config_hash(config: TrialConfig) -> str:
    """The trial config's identity, see `mapping_hash`."""
    return mapping_hash(config.to_mapping())


def config_from_mapping(mapping: Mapping[str, Any]) -> TrialConfig:
    """The config that `TrialConfig.to_mapping` wrote. Unknown family or fields raise `UsageError` naming the known."""
    values = dict(mapping)
    if "family" not in values:
        raise UsageError("a trial config needs the key 'family'")
    cls = get_family(values.pop("family")).Config
    known, required = _fields_of(cls)
    if unknown := sorted(map(str, values.keys() - known)):
        raise UsageError(f"{cls.family}: unknown {', '.join(unknown)}; known: {', '.join(sorted(known))}")
    if missing := [name for name in required if name not in values]:
        raise UsageError(f"{cls.family}: missing {', '.join(missing)}")
    return cls(**values)


@functools.cache  # every leased task asks
def _fields_of(cls: type[TrialConfig]) -> tuple[frozenset[str], tuple[str, ...]]:
    """Return the names of a config's fields, and of those without a default, in their order."""
    fields = dataclasses.fields(cls)
    required = tuple(field.name for field in fields if field.default is dataclasses.MISSING)
    return frozenset(field.name for field in fields), required
