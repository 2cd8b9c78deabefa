"""A queue that somebody else filled imports nothing: the user who submits records whose code runs, no data does."""

import json
import os

import pytest
from test_dispatch import Clock, ScriptedExecutor, run_with, submit_texts

from farm.dispatch import submitted_code
from farm.dispatch.submitted_code import SubmittedCode, record_code, record_submitted
from farm.queue.jobs import configs_of_text
from featurize.configs.space import parse_space, sample_range
from featurize.configs.trial import canonical_json, code_marks, config_from_mapping
from tests.warehouse.warehouse_rows import ask

OWN = "mine.nets:build"


def config(model=OWN, **changes):
    values = {"family": "zoo", "model": model, "inputs": "float32[4]", "batch_size": 2, **changes}
    return canonical_json(config_from_mapping(values).to_mapping())


LIBRARY = config("torchvision.models:resnet18", inputs="float32[3,32,32]")


@pytest.fixture(autouse=True)
def state(tmp_path, monkeypatch):
    folder = tmp_path / "state of a'; echo foo"
    monkeypatch.setenv("XDG_STATE_HOME", str(folder))
    forget(monkeypatch)
    return folder / "gpufarm"


def forget(monkeypatch):
    """Become a process that knows nothing but the record."""
    monkeypatch.setattr(submitted_code, "_of_this_process", set())


def may_run(code, text):
    """Return whether a config counts as the user's own; one that does not is refused."""
    (decided,), refusal = code.decide_all(configs_of_text(text))
    assert (refusal is None) == bool(code_marks(decided))
    return refusal is None


class Executor(ScriptedExecutor):
    def __init__(self):
        super().__init__(Clock())
        self.marks = []

    def submit(self, worker, task, upcoming=None):
        self.marks.append(code_marks(task.config).get("model"))
        super().submit(worker, task, upcoming)


def dispatch(folder, queue, configs, trust=()):
    submit_texts(queue, configs, "zoo-00000001", "zoo")
    executor = Executor()
    run_with(folder, queue, executor, trust=trust)
    return executor.indexes(), executor.marks


def runs(folder):
    return ask(folder, "SELECT task_index, status, error_type, error FROM runs ORDER BY ALL")


def test_a_task_whose_code_this_user_did_not_submit_lands_as_invalid_and_says_what_to_do(folder, queue):
    # A library's model runs, under the rules for data.
    assert dispatch(folder, queue, [config(), LIBRARY, config("mine.nets:other")]) == ([1], [None])
    first, library, other = runs(folder)
    assert (first[1:3], library[1], other[1:3]) == (("invalid", "NotTrusted"), "ok", ("invalid", "NotTrusted"))
    assert "trust=[mine.nets]" in first[3] and OWN in first[3]


@pytest.mark.parametrize(("trust", "mark"), [(["mine"], "trusted"), (["mine.nets"], "trusted"), ([OWN], "typed")])
def test_a_module_that_is_trusted_runs(folder, queue, trust, mark):
    assert dispatch(folder, queue, [config(), config("yours:build")], trust) == ([0], [mark])


def test_what_a_trusted_module_imports_does_not_run(folder, queue):
    assert dispatch(folder, queue, [config("mine.nets:os.system"), config()], ["mine"]) == ([1], ["trusted"])
    assert "leads out of the trusted mine.nets" in runs(folder)[0][3]


def test_of_trials_that_run_together_each_has_its_own_permission():
    record_code([OWN])
    names = (OWN, "mine.nets:other", "torchvision.models:get_model")
    several = [configs_of_text(config(name))[0] for name in names]
    configs, refusal = SubmittedCode(["mine.nets"]).decide_all(several)
    assert [code_marks(one) for one in configs] == [{"model": "typed"}, {"model": "trusted"}, {}] and refusal is None


def test_what_the_user_samples_is_recorded_and_runs_in_a_later_process(folder, queue, state, monkeypatch):
    space = parse_space("zoo", {"model": OWN, "inputs": "float32[4]", "batch_size": 2})
    configs = list(record_submitted(sample_range(space, 0, 0, 2)))
    assert state.stat().st_mode & 0o777 == 0o700
    forget(monkeypatch)
    texts = [canonical_json(one.to_mapping()) for one in configs]
    assert dispatch(folder, queue, [*texts, config("mine.nets:other")]) == ([0, 1], ["typed", "typed"])


def test_a_librarys_model_with_arguments_that_data_may_not_give_needs_its_own_record(monkeypatch):
    fetching = config("torchvision.models:resnet18", arguments='{"weights":"DEFAULT"}', inputs="float32[3,32,32]")
    record_code(["torchvision.models:resnet18"])
    assert may_run(SubmittedCode(), LIBRARY)
    assert not may_run(SubmittedCode(), fetching)
    space = {"model": "torchvision.models:resnet18", "arguments": "{weights: DEFAULT}", "inputs": "float32[3,32,32]"}
    assert len(list(record_submitted(sample_range(parse_space("zoo", {**space, "batch_size": 2}), 0, 0, 1)))) == 1
    forget(monkeypatch)
    assert may_run(SubmittedCode(), fetching)


def test_names_of_code_that_a_row_brought_are_not_recorded():
    assert len(list(record_submitted([config_from_mapping(json.loads(config()))]))) == 1
    assert not may_run(SubmittedCode(), config())


def link_elsewhere(file):
    file.rename(file.with_suffix(".elsewhere"))
    file.symlink_to(file.with_suffix(".elsewhere"))


def replace_by_a_pipe(file):
    file.unlink()
    os.mkfifo(file)


SPOILT = {
    "open to others": lambda file: file.parent.chmod(0o777),
    "a link": link_elsewhere,
    "a pipe": replace_by_a_pipe,
    "garbage": lambda file: file.write_bytes(b"\xff\x00[1]\n{}\n" + b"[" * 100_000),
    "torn": lambda file: file.write_bytes(file.read_bytes()[:-4]),
}


@pytest.mark.parametrize("how", SPOILT)
def test_only_a_record_that_this_user_alone_can_write_counts(state, how, monkeypatch):
    record_code([OWN])
    forget(monkeypatch)
    SPOILT[how](state / "submitted_code")
    assert not may_run(SubmittedCode(), config())
