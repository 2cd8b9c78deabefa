"""Errors of the user's input and of the environment differ in type, and are printed alike."""

import pickle

import pytest

from conf.cli.command_line import EXIT_USAGE, run
from conf.errors import CommandError, EnvironmentProblem, UsageError, unknown_name


@pytest.mark.parametrize("kind", [UsageError, EnvironmentProblem])
def test_both_kinds_end_a_command_with_one_line_and_exit_code_2(kind, capsys):
    def entry(cfg):
        raise kind("a'; echo foo\nis damaged")

    assert run("status", entry, []) == EXIT_USAGE
    assert capsys.readouterr().err == "error: a'; echo foo\\nis damaged\n"


def test_neither_kind_is_taken_for_the_other():
    assert issubclass(UsageError, CommandError) and issubclass(EnvironmentProblem, CommandError)
    assert not issubclass(EnvironmentProblem, UsageError) and not issubclass(EnvironmentProblem, ValueError)
    assert isinstance(unknown_name("family", "cmm", ["cnn"]), UsageError)


@pytest.mark.parametrize("kind", [UsageError, EnvironmentProblem])
def test_an_error_of_a_worker_arrives_whole(kind):
    error = pickle.loads(pickle.dumps(kind("line 1\nline 2", keep_lines=True)))
    assert (type(error), str(error), error.keep_lines) == (kind, "line 1\nline 2", True)
