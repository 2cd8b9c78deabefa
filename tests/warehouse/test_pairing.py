"""Rows of two sides paired by a key, and their differences summed up."""

import contextlib

import duckdb
import pytest

from warehouse.reading.pairing import paired, shift_of, shift_text, summed_up

KEY = ("config_hash", "device_name")
LABELS = {"peak_memory_mib": "peak_memory_mib", "smact": "smact"}


def pairs(before, after, **options):
    """Pairs of rows (config_hash, device_name, peak_memory_mib, smact)."""
    with contextlib.closing(duckdb.connect()) as connection:
        for side, rows in (("old_rows", before), ("new_rows", after)):
            columns = "config_hash VARCHAR, device_name VARCHAR, peak_memory_mib DOUBLE, smact DOUBLE"
            connection.execute(f"CREATE TABLE {side} ({columns})")
            connection.executemany(f"INSERT INTO {side} VALUES (?, ?, ?, ?)", rows)
        return paired(connection, "old_rows", "new_rows", KEY, LABELS, {"runs": "count(*)"}, **options)


def test_medians_of_rows_with_the_same_key_are_paired_and_null_equals_null():
    before = [("a", None, 10.0, 0.5), ("a", None, 30.0, None), ("b", "T4", 1.0, 0.1)]
    (pair,) = pairs(before, [("a", None, 25.0, 0.6), ("b", "H100", 1.0, 0.1)])
    assert pair.key == {"config_hash": "a", "device_name": None}
    assert pair.before == {"peak_memory_mib": 20.0, "smact": 0.5, "runs": 2}
    assert pair.shift("peak_memory_mib") == pytest.approx(0.25) and pair.shift("smact") == pytest.approx(0.1)


def test_keys_of_one_side_alone_are_returned_where_they_are_wanted():
    both = pairs([("a", "T4", 1.0, None)], [("b", "T4", 2.0, None)], alone=True)
    assert [(pair.key["config_hash"], bool(pair.before), bool(pair.after)) for pair in both] == [
        ("a", True, False),
        ("b", False, True),
    ]
    assert [pair.shift("peak_memory_mib") for pair in both] == [None, None]


def test_differences_are_summed_up_by_group_with_the_largest_first():
    before = [(name, device, 100.0, None) for device in ("T4", "L4") for name in "abcd"]
    after = [(name, "T4", 100.0 + 10 * place, None) for place, name in enumerate("abcd")] + [("d", "L4", 50.0, None)]
    lesser, larger = summed_up(pairs(before, after), "peak_memory_mib", 0.15, ("device_name",))
    assert (lesser.group, lesser.pairs, lesser.largest, lesser.p90) == ({"device_name": "L4"}, 1, -0.5, 0.5)
    assert (larger.pairs, larger.beyond, larger.equal, larger.examples) == (4, 2, 1, ("d", "c", "b", "a"))
    assert (larger.median, larger.largest) == pytest.approx((0.15, 0.3))
    assert larger.to_mapping()["device_name"] == "T4"
    assert summed_up(pairs(before, after), "smact", 0.15) == []


@pytest.mark.parametrize(
    ("label", "before", "after", "shift", "text"),
    [
        ("peak_memory_mib", 200.0, 210.0, 0.05, "+5.0%"),
        ("smact", 0.5, 0.4, -0.1, "-0.100"),
        ("peak_memory_mib", None, 1.0, None, None),
        ("step_time_ms", 0.0, 1.0, None, None),
    ],
)
def test_a_shift_is_relative_and_of_ratios_the_difference(label, before, after, shift, text):
    found_shift = shift_of(label, before, after)
    assert found_shift == (None if shift is None else pytest.approx(shift))
    assert found_shift is None or shift_text(label, found_shift) == text
