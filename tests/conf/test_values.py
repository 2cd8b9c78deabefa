"""Kinds of values as YAML files declare them, text that stands as typed, and lines that are fit for a terminal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conf.arguments import keyed_values
from conf.errors import UsageError
from conf.overrides import literal
from conf.plain_text import bounded, one_line, printable, shown
from conf.values import Kind, problems_of


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
    assert not [value for value in right if kind.problem(value)]
    assert not [value for value in wrong if not kind.problem(value)]


def test_a_number_is_told_the_bound_that_it_is_beyond():
    kind = Kind.parse("int 1 to 10000000")
    assert kind.problem(0) == "must be an integer >= 1, got 0"
    assert kind.problem(10**11) == "must be an integer <= 10000000, got 100000000000"
    assert Kind.parse("number 0.001 to 1e7").problem(math.inf) == "must be a finite number >= 0.001, got inf"


def test_an_unknown_kind_is_a_mistake_of_ours():
    with pytest.raises(ValueError, match="unknown kind 'integer'"):
        Kind.parse("integer | null")


def test_every_bad_value_is_named_and_a_parent_that_is_none_once():
    kinds = {key: Kind.parse("int") for key in ("n", "log.keep", "log.size", "absent", "required")}
    values = {"n": "a", "log": None, "required": "???"}
    assert problems_of(values, kinds) == [
        "n must be an integer, got 'a'", "log must be a mapping such as {key: value}, got None",
    ]  # fmt: skip


@given(st.text(alphabet=st.sampled_from("\\${}'\"a:, [].\n"), max_size=12))
def test_text_that_stands_as_typed_is_that_text_for_omegaconf(text):
    from omegaconf import OmegaConf

    cfg = OmegaConf.create({"key": "a"})
    OmegaConf.update(cfg, "key", literal(text))
    assert cfg.key == text
    assert OmegaConf.to_container(cfg, resolve=True) == {"key": text}


@given(st.text(alphabet=st.characters(categories=("Cc", "Cs", "Cf", "Zl", "Zp", "L")), max_size=30))
def test_a_line_holds_nothing_that_moves_a_cursor_and_can_be_encoded(text):
    line = one_line(text)
    assert line.isprintable() and line.encode() is not None and len(line) <= 10 * len(text)
    assert printable(text).count("\n") == text.count("\n")


def test_what_is_quoted_back_is_short_and_shows_bytes():
    assert shown("a\udcff") == "'a\\xff'" and shown("\\udcff") == "'\\\\udcff'"
    assert len(shown("x" * 10**6)) < 300 and len(bounded("x" * 10**6)) < 5000


@pytest.mark.parametrize(
    ("argument", "expected_text"),
    [
        ("n=many", "n must be an integer >= 1, got 'many'"), ("n=[1", "cannot read 'n=[1'"),
        ("n=${nope}", "cannot read 'n=${nope}'"), ("n=nan", "n must be an integer >= 1"),
        ("m=1", "valid are KEY=VALUE of n, data"), ("n=2026-99-99", "n must be an integer >= 1"),
        ("data=[a]", "data must be a path, got a list"), ("data=\udcff", "is not valid UTF-8"),
        ("n", "unknown argument 'n'"),
        ("n=" + "[" * 5000, "cannot read"), ("data=", "data must be a path"),
    ],
)  # fmt: skip
def test_arguments_without_a_yaml_file_are_held_against_their_kinds_as_well(argument, expected_text):
    kinds = {"n": "int >= 1", "data": "new path"}
    assert keyed_values(["n=5", "data=a\\b"], kinds) == {"n": 5, "data": "a\\b"}
    with pytest.raises(UsageError) as mistake:
        keyed_values([argument], kinds)
    assert expected_text in str(mistake.value)
