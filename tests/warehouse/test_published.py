"""Reading other people's published files: names, odd values, rows that are no labels."""

import pytest

from conf.errors import UsageError
from tests.warehouse.warehouse_rows import TIMM_HEADER as TIMM, TRANSFORMER, cnn_name, csv_table, mlp_name
from warehouse.exchange.published import parse_filename, read_published

MLP = ("Filename", "Depth", "Total Parameters", "Batch Size", "Max GPU Memory (MiB)", "Avg GPUTL", "Avg SMACT")
CNN = (*MLP, "Avg DRAMA", "Status")


def read(path):
    return read_published(path).files[0].rows


NAMES = {
    "an MLP": (
        mlp_name(),
        {
            "activation": "leaky_relu",
            "topology": "bottleneck",
            "dropout": 0.25,
            "batch_norm": True,
            "softmax": True,
        },
    ),
    "dropout switched off": (mlp_name(switch="False"), {"dropout": 0}),
    "a CNN": (
        cnn_name(),
        {
            "topology": "reverse_pyramid",
            "activation": "silu",
            "dropout": 0,
            "channels": 3,
            "classes": 7,
            "image_size": 32,
            "batch_size": 4,
        },
    ),
    "an MLP of the plain first half": (
        "input:9_output:3_depth:1_arch:uniform_batch:2.out",
        {"activation": "relu", "dropout": 0, "batch_norm": False, "softmax": False},
    ),
    "a transformer": (
        TRANSFORMER,
        {
            "vocabulary_size": 1000,
            "sequence_length": 16,
            "feed_forward": 90,
            "batch_size": 8,
            "heads": 4,
            "depth": 2,
            "dropout": 0.5,
        },
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_stands_twice_and_values_with_underscores_are_told_apart(name):
    file_name, wanted = NAMES[name]
    parsed = parse_filename(file_name)
    assert {key: (parsed[key], type(parsed[key]) is bool) for key in wanted} == {
        key: (value, type(value) is bool) for key, value in wanted.items()
    }


@pytest.mark.parametrize(
    ("name", "expected_text"),
    [
        ("model.out", "no known first key"),
        ("input:9_output:3_arch:uniform_batch:2.out", "lacks depth"),
        (mlp_name(switch="maybe"), "dropout twice"),
        ("input:many_output:3_depth:1_arch:uniform_batch:2.out", "many"),
    ],
)
def test_a_name_that_cannot_be_read_says_why(name, expected_text):
    with pytest.raises(ValueError, match=expected_text):
        parse_filename(name)


def test_not_measured_is_none_and_percentages_become_fractions(tmp_path):
    rows = read(
        csv_table(
            tmp_path / "some.csv",
            CNN,
            [
                (cnn_name(), 3, 100, 4, 1500, 50, -1, "0.5", "SUCCESSFUL"),
                (cnn_name(), 3, 100, 4, 1500, "", 0, 1.5, "SUCCESSFUL"),
            ],
        )
    )
    assert dict(rows[0].utilization) == {"gpu_util": 0.5, "smact": None, "drama": 0.5}
    assert dict(rows[1].utilization) == {"gpu_util": None, "smact": 0.0, "drama": None}
    assert "smocc" not in rows[0].utilization, "an absent column is absent, not missing values"


@pytest.mark.parametrize(
    ("memories", "fake", "statuses", "reasons"),
    [
        # Memory that falls with the batch ran out, and so did every larger batch.
        (
            [12_000, 22_000, 9_000, 39_000, 8_000],
            30_000.0,
            ["ok", "ok", "oom", "oom", "oom"],
            {2: "less memory than at a smaller batch", 3: "a smaller batch ran out of memory"},
        ),
        # A fall that the card cannot have caused is no end.
        ([4_900, 3_500, 5_000, 7_700], 100.0, ["ok"] * 4, {0: "more than at a larger batch", 1: None}),
        # A row that falls short of its smaller batches' growth at the card is in doubt.
        ([10_500, 20_000, 39_000, 40_100], 100.0, ["ok"] * 4, {2: None, 3: "peak before a crash"}),
        # Tensors that fill more than the card ran out of memory, whatever was seen.
        ([9_000, 40_100], 41_000.0, ["oom", "oom"], {0: "fill more than the card"}),
        # A run that took less than its tensors fill is in doubt.
        ([2_000, 2_000], 5_000.0, ["ok", "ok"], {0: "may not have trained"}),
    ],
)
def test_memory_by_batch_size_tells_which_rows_ran_out_or_are_in_doubt(tmp_path, memories, fake, statuses, reasons):
    cells = [("net", "nets", 8 * 2**place, memory, fake) for place, memory in enumerate(memories)]
    rows = read(csv_table(tmp_path / "timm.csv", TIMM, cells))
    assert [row.status for row in rows] == statuses
    assert rows[0].module == "nets" and rows[0].estimates == {"faketensor": fake}
    assert all(row.doubt is None for row in rows if row.status == "oom")
    for place, text in reasons.items():
        reason = rows[place].doubt if rows[place].status == "ok" else rows[place].reason
        assert reason is None if text is None else text in reason


def test_what_cannot_be_read_is_told_with_what_can(tmp_path):
    odd = csv_table(tmp_path / "odd" / "odd.csv", ("x", "y"), [(1, 2)])
    empty = csv_table(tmp_path / "b.csv", MLP, [])
    for arguments, message in (
        ((odd,), r"odd.csv: unknown header \(x, y\); known: gpumemnet \(.*timm \("),
        ((odd.parent,), "holds no file with a known header"),
        ((odd.parent, ["odd"]), "unknown header"),
        ((empty, ["nix"]), "files=nix: no such CSV file"),
        ((tmp_path / "none",), "there is no such file or folder"),
    ):
        with pytest.raises(UsageError, match=message):
            read_published(*arguments)


def test_a_batch_that_the_file_has_twice_is_read(tmp_path):
    path = csv_table(tmp_path / "twice.csv", TIMM, [("net", "nets", batch, 3000, 100) for batch in (8, 8, 16)])
    assert [row.status for row in read(path)] == ["ok"] * 3
