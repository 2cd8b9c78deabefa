"""Converts the queue's texts to typed values and back: configs, trial settings and devices are parsed only here.

Start reading at `task_of_row`. A data folder can come from anybody, so a row may hold any text.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from conf.errors import UsageError
from conf.plain_text import shown
from farm.queue.job_records import UnreadableTask
from featurize.configs.trial import TrialConfig, canonical_json, config_from_mapping, mapping_hash
from warehouse.files.layout import checked_name
from workers.devices import DeviceChoice
from workers.settings import TrialSettings
from workers.task import Task

TOGETHER = "together"  # key of a group's members
MOST_TOGETHER = 4
TASK_COLUMNS = ("job_id", "family", "settings_json", "device", "task_index", "attempt", "config_json")


def task_of_row(row: Sequence[Any]) -> Task | UnreadableTask:
    """Return the typed task of a row of `TASK_COLUMNS`; an `UnreadableTask` if one of its texts cannot be parsed."""
    job_id, family, settings_json, device, task_index, attempt, config_json = row
    try:
        config, *partners = configs_of_text(config_json)
        return Task(
            job_id=job_id,
            task_index=task_index,
            attempt=attempt,
            config=config,
            partners=tuple(partners),
            settings=settings_of_text(settings_json),
            device=device_from_key(device),
        )
    except UsageError as error:
        mapping = _mapping_of(config_json)
        return UnreadableTask(
            job_id=job_id,
            task_index=task_index,
            attempt=attempt,
            family=_family_of(mapping, family),
            problem=str(error),
            config=mapping,
            simulated=_is_simulated(device),
        )


def text_of_config(config: TrialConfig) -> str:
    """Return a trial config as the queue holds it: canonical JSON."""
    return canonical_json(config.to_mapping())


def text_of_group(configs: Sequence[TrialConfig]) -> str:
    """Return trials that start together on one device as the queue holds them: canonical JSON."""
    return canonical_json({TOGETHER: [config.to_mapping() for config in configs]})


def text_of_task(members: Sequence[TrialConfig]) -> str:
    """Return a task as the queue holds it: one config, or a group of several."""
    return text_of_config(members[0]) if len(members) == 1 else text_of_group(members)


def configs_of_text(text: str) -> tuple[TrialConfig, ...]:
    """Return what `text_of_config` or `text_of_group` wrote: one config, or those of a group.

    Their names of code are data. Raises `UsageError`.
    """
    with _refusing(text, "is no trial config"):
        mapping = json.loads(text)
        if TOGETHER not in mapping:
            return (config_from_mapping(mapping),)
        members = mapping[TOGETHER]
        if mapping.keys() != {TOGETHER} or not isinstance(members, list) or not 2 <= len(members) <= MOST_TOGETHER:
            raise UsageError(f"{shown(text)} is no group of 2 to {MOST_TOGETHER} trial configs")
        configs = tuple(map(config_from_mapping, members))
        if any(config.ranks > 1 for config in configs):
            raise UsageError(f"{shown(text)}: a trial of several ranks cannot be in a group")
        return configs


def config_hash_of_text(text: str) -> str | None:
    """Return the hash of the config that a text of the queue holds; None for one that is no JSON object."""
    mapping = _mapping_of(text)
    return None if mapping is None else mapping_hash(mapping)


def text_of_settings(settings: TrialSettings) -> str:
    """Return the trial settings of a job as the queue holds them: canonical JSON."""
    return canonical_json(settings.to_mapping())


@functools.lru_cache(maxsize=256)  # the tasks of a job share one text
def settings_of_text(text: str) -> TrialSettings:
    """Return the settings that `text_of_settings` wrote. Raises `UsageError`."""
    with _refusing(text, "are no trial settings"):
        return TrialSettings(**json.loads(text))


def device_key(choice: DeviceChoice) -> str:
    """Return the device of a job as the queue holds it: tasks are leased only to a dispatcher of the very same text."""
    return canonical_json(choice.to_mapping())


@functools.lru_cache(maxsize=256)
def device_from_key(key: str) -> DeviceChoice:
    """Return the device that `device_key` wrote. Raises `UsageError`."""
    with _refusing(key, "is no device"):
        fields = json.loads(key)
        return DeviceChoice(backend=fields.pop("backend"), **fields)


@contextlib.contextmanager
def _refusing(text: str, reason: str) -> Iterator[None]:
    """Raise `UsageError` for whatever reading `text` raises: the classes' own checks meet values of any type."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{shown(text)} {reason}: {type(error).__name__}: {error}") from error


def _is_simulated(device: str) -> bool:
    try:
        return device_from_key(device).backend == "simulated"
    except UsageError:
        return False


def _family_of(mapping: Mapping[str, Any] | None, of_job: str) -> str:
    """Return the family that a config names if a run can land under that name, else its job's."""
    members = (mapping or {}).get(TOGETHER)
    if isinstance(members, list) and members and isinstance(members[0], dict):
        mapping = members[0]  # as a group's task has the family of its first member
    try:
        return checked_name("family", (mapping or {}).get("family"))
    except ValueError:
        return of_job


def _mapping_of(text: str) -> Mapping[str, Any] | None:
    try:
        mapping = json.loads(text)
    except (ValueError, RecursionError, TypeError):
        return None
    return mapping if isinstance(mapping, dict) else None
