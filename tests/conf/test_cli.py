"""The command line: overrides compose, mistakes are told together in one line with the valid choices, exit code 2."""

import errno
import pickle
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml

from conf.cli import command_line as cli
from conf.cli.commands import settings_class
from conf.cli.settings import documented_keys, group_options
from conf.errors import EnvironmentProblem, UsageError


def _run(argv, entry=lambda cfg: None, name="submit"):
    return cli.run(name, entry, argv)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["+arch=cmm", "n=5"], f"unknown arch 'cmm'; known: {', '.join(group_options('arch'))}"),
        (["arch=cnn", "n=5"], "+arch=cnn"),
        (["+arch=cnn", "n=5", "cluster=slurm"], "unknown cluster 'slurm'; known: inline, local"),
        (["+arch=cnn"], "missing n="),
        (["+arch=cnn", "n=5", "policy=[uniform"], "policy=[uniform"),
        (["+arch=cnn", "n=5", "+polcy=uniform"], "unknown key 'polcy'; did you mean policy?"),
        (["+arch=cnn", "nn=5", "polcy=a"], "; unknown key 'polcy'; did you mean policy?"),
        (["--n", "5"], "unknown option '--n'"),
    ],
)
def test_a_mistake_names_what_is_known_or_how_to_write_it(capsys, arguments, words):
    assert _run(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_share_of_pairs_has_a_second_spelling_without_a_plus(capsys):
    assert cli.load_config(settings_class("grow"), ["grow.collocate=0.2"]).collocate == 0.2
    assert _run(["+grow.collocate=0.2", "n=5"], name="grow") == 2
    assert "unknown key 'grow.collocate'; did you mean collocate?" in capsys.readouterr().err


def _space(*overrides, family="cnn"):
    from omegaconf import OmegaConf

    config = cli.load_config(settings_class("submit"), [f"+arch={family}", "n=1", *overrides])
    return OmegaConf.to_container(config.arch.space)


def _own_space(family):
    return yaml.safe_load((Path(cli.__file__).parents[1] / "arch" / f"{family}.yaml").read_text())["space"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[8,8,16]", [8, 8, 16]),  # weighted: 8 is twice as likely
        ("{low: 4, high: 12}", {"low": 4, "high": 12}),
        ("{low: 4, high: 12, step: 4}", {"low": 4, "high": 12, "step": 4}),
        ("-3", -3),
        ("null", None),
    ],
)
@pytest.mark.parametrize("plus", ["", "++"])
def test_what_is_given_of_a_search_space_replaces_what_stood_there(text, value, plus):
    after = _space(f"{plus}arch.space.batch_size={text}", family="gpt")
    assert after == _own_space("gpt") | {"batch_size": value}
    assert list(after) == list(_own_space("gpt")), "the order is part of a space's identity"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES])
def test_what_the_machine_refuses_is_one_line_and_not_a_traceback(number, capsys):
    assert _run(["+arch=cnn", "n=1"], Mock(side_effect=OSError(number, "refused", "/some/where"))) == 2
    assert capsys.readouterr().err == "error: refused: /some/where\n"


@pytest.mark.parametrize("kind", [UsageError, EnvironmentProblem])
def test_both_kinds_of_errors_end_a_command_with_one_line_and_arrive_whole_from_a_worker(kind, capsys):
    assert _run([], Mock(side_effect=kind("a'; echo foo\nis damaged")), "status") == 2
    assert capsys.readouterr().err == "error: a'; echo foo\\nis damaged\n"
    error = pickle.loads(pickle.dumps(kind("line 1\nline 2", keep_lines=True)))
    assert (type(error), str(error), error.keep_lines) == (kind, "line 1\nline 2", True)


def test_our_own_bugs_keep_their_traceback():
    with pytest.raises(ValueError, match="not a user's"):
        _run(["+arch=cnn", "n=1"], Mock(side_effect=ValueError("not a user's mistake")))


@pytest.mark.parametrize("name", ["estimate", "plan"])
def test_help_explains_the_common_keys_and_names_the_others_and_help_all_explains_all(capsys, name):
    assert _run(["--help"], name=name) == _run(["--help", "all"], name=name) == 0
    short, _, whole = capsys.readouterr().out.partition("\nEstimate" if name == "estimate" else "\nFind")
    keys = [key.name for key in documented_keys(settings_class(name))]
    explained = [key for key in keys if f"\n  {key}=" in short]
    others = [key for key in keys if key not in explained]
    assert "model" in explained and "weight_decay" in others
    assert short.splitlines()[-1] == f"`--help all` explains {len(others)} more keys: {', '.join(others)}."
    assert all(f"\n  {key}=" in whole for key in (*explained, *others)) and "--help all" not in whole


@pytest.mark.parametrize("sql", ["SELECT 1 AS one", "SELECT * FROM runs WHERE status = 'ok'"])
def test_the_positional_argument_may_hold_an_equals_sign_and_is_no_other_value_with_spaces(sql, capsys):
    seen = []
    assert _run([sql, "data=/tmp/my data", "format=csv"], seen.append, name="query") == 0
    assert [(one.sql, one.data, one.format) for one in seen] == [(sql, "/tmp/my data", "csv")]
    assert _run([sql, "sql=SELECT 2"], name="query") == 2
    assert "sql is given twice" in capsys.readouterr().err
