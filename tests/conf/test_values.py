"""Kinds of values as YAML files declare them, text that stands as typed, and lines that are fit for a terminal."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings, strategies as st

from conf.cli.command_line import load_config, load_settings
from conf.cli.commands import settings_class
from conf.cli.settings import Checked, Kind, key
from conf.errors import UsageError, one_line, printable, shown, truncated


@pytest.mark.parametrize(
    ("declared", "right", "wrong"),
    [
        ("int", [0, -5, 2**63 - 1], [True, 1.0, "1", None, math.nan, [1], 2**63, -(2**63)]),
        ("int 1 to 5 | null", [1, 5, None], [0, 6, 10**400, 1.5, False]),
        ("number > 0", [1, 0.5, 1e308], [0, -1, math.inf, math.nan, True, "1", 10**400]),
        ("number >= 0 | bool", [0, 0.0, True], [-0.1, None, -math.inf]),
        ("number <= 1e9", [-1, 1e9], [1e9 + 1, math.inf]),
        ("bool", [True, False], [0, 1, "true", None]),
        ("text", ["a", "null", "\\"], ["", None, 5, ["a"], {"a": 1}, "a\0"]),
        ("list of text", [[], ["a"]], ["a", [1], [None], None]),
        ("list of int | null", [[1], [], None], [["a"], [1.5], [True], 5]),
        ("mapping | text", [{}, {"a": 1}, "a"], [[], 5, None]),
    ],
)
def test_a_kind_takes_what_it_declares_and_nothing_else(declared, right, wrong):
    kind = Kind.parse(declared)
    assert not [value for value in right if kind.problem("n", value)]
    assert not [value for value in wrong if not kind.problem("n", value)]


def test_every_bad_value_is_named_and_a_parent_that_is_no_mapping():
    with pytest.raises(UsageError) as mistake:
        load_config(settings_class("submit"), ["n=a", "log=null", "trial={retries: 1}"])
    message = str(mistake.value)
    assert message.startswith("log must be a mapping such as {key: value}, got None; unknown key 'trial.retries'")
    assert "n must be an integer >= 1, got 'a'" in message


@settings(max_examples=30)
@given(st.text(alphabet=st.characters(categories=("Cc", "Cs", "Cf", "Zl", "Zp", "L")), max_size=30))
def test_a_line_holds_nothing_that_moves_a_cursor_and_can_be_encoded(text):
    line = one_line(text)
    assert line.isprintable() and line.encode() is not None and len(line) <= 10 * len(text)
    assert printable(text).count("\n") == text.count("\n")


def test_what_is_quoted_back_is_short_and_shows_bytes():
    assert shown("a\udcff") == "'a\\xff'" and shown("\\udcff") == "'\\\\udcff'"
    assert len(shown("x" * 10**6)) < 300 and len(truncated("x" * 10**6)) < 5000


@dataclass(frozen=True, kw_only=True)
class OwnSettings(Checked):
    """The keys of a command that is in no table."""

    n: int = key(5, kind="int >= 1")
    data: str = key(help="where", kind="new path")
    names: tuple[str, ...] = key((), kind="text | list of text", choices=("a", "b"))


@pytest.mark.parametrize(
    ("argument", "expected_text"),
    [
        ("n=many", "n must be an integer >= 1, got 'many'"),
        ("n=${nope}", "n: Interpolation key 'nope' not found"),
        ("m=1", "unknown key 'm'; valid keys: n, data, names"),
        ("data=[a]", "data must be a path, got a list"),
        ("n=" + "[" * 5000, "cannot read"),
        ("data=", "data must be a path"),
        ("names=[a,c]", "unknown name in names: 'c'; known: a, b"),
    ],
)
def test_arguments_of_a_command_of_no_table_are_held_against_their_kinds_as_well(argument, expected_text):
    assert load_settings(OwnSettings, ["names=b", "data=a\\b"]).names == ("b",)
    with pytest.raises(UsageError) as mistake:
        load_settings(OwnSettings, [argument])
    assert expected_text in str(mistake.value)
