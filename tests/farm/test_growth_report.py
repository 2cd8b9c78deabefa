"""A growth cycle's report: what a person finds on the page in the morning, and a program in the JSON beside it.

Start reading at `Nights`, which lands rows as the farm does and writes the journal's steps with their payloads.
"""

import dataclasses
import datetime
import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from farm.nights.journal import ChoicePayload, Journal, payload_of
from farm.nights.report import write_report
from tests.farm.canary_nights import DEVICE, OLD
from tests.parsed_page import ParsedPage
from tests.warehouse.warehouse_rows import run_row
from warehouse.files.folder import DataFolder
from warehouse.files.snapshots import take_snapshot
from warehouse.files.writer import RunWriter

CARD_MIB = 40_960.0


class Nights:
    """Writes runs and journal lines of one folder; time is told and never waited for."""

    def __init__(self, folder: DataFolder):
        self.folder = folder
        self.now = datetime.datetime(2026, 11, 18, 1, tzinfo=datetime.UTC)
        self.journal = Journal(folder, clock=lambda: self.now)
        self._random = random.Random(0)
        self._written = 0

    def run_row(self, family: str = "cnn", **changes) -> dict:
        """One run that finishes now."""
        draw, self._written = self._random, self._written + 1
        smact = draw.random()
        about = {
            "family": family,
            "config": json.dumps({"family": family, "n": self._written}),
            "config_hash": f"{self._written:012x}",
            "source": "measured",
            "device_name": DEVICE,
            "device_uuid": "GPU-1",
            "device_memory_mib": CARD_MIB,
            "batch_size": draw.randint(1, 128),
            "parameters": int(10 ** draw.uniform(4, 8)),
            "peak_memory_mib": 10 ** draw.uniform(2.8, 4.6),
            "smact": smact,
            "smocc": smact * 0.6,
            "drama": draw.random(),
            "quality": "trusted",
            "finished_at": self.now,
        }
        return run_row(self._written, **about | changes)

    def write(self, *rows: dict) -> None:
        """Land runs, those of a family in one file, which is quick."""
        for family in {row["family"] for row in rows}:
            RunWriter(self.folder).write_batch([row for row in rows if row["family"] == family])

    def failure(self, status: str, error: str | None = None, **changes) -> dict:
        labels = dict.fromkeys(("peak_memory_mib", "smact", "smocc", "drama"))
        return self.run_row(**{"status": status, "error": error, **labels, **changes})

    def step(self, cycle: str, name: str, payload: dict, minutes: float = 1.0) -> None:
        self.journal.start(cycle, name)
        self.now += datetime.timedelta(minutes=minutes)
        self.journal.done(cycle, name, payload)

    def begin(self) -> str:
        self.now = self.now.replace(hour=1, minute=0, second=0) + datetime.timedelta(days=1)
        return self.journal.begin({"n": 20, "policy": "active"}, "0123abcd").name

    def measured(self, rows: list[dict]) -> str:
        """A night up to the end of its step `run`."""
        cycle = self.begin()
        self.step(cycle, "canaries", canaries_payload())
        self.step(cycle, "choose", {"runs": len(rows), "policy": "active"}, minutes=2)
        self.write(*(row | {"finished_at": self.now + datetime.timedelta(minutes=30)} for row in rows))
        ran = {"runs": len(rows), "by_status": Counter(row["status"] for row in rows), "ended": "all"}
        self.step(cycle, "run", {**ran, "gpu_seconds": 3000.0, "energy_j": 9.0e5}, minutes=60)
        return cycle

    def night(self, rows: list[dict], *results: dict, findings: Sequence[dict] = (), frozen: bool = False) -> str:
        """A whole night up to its report, whose step is still open.

        findings: of its checks. frozen: in a snapshot, which takes as long as all else; without it, the report reads
        the same rows in the folder.
        """
        cycle = self.measured(rows)
        counts = dict(take_snapshot(self.folder, cycle).rows) if frozen else {"runs": self._written}
        self.step(cycle, "land", {"snapshot": cycle if frozen else None, "rows": counts, "findings": [*findings]})
        self.step(cycle, "learn", {"results": list(results)}, minutes=6)
        self.journal.start(cycle, "report")
        return cycle


def canaries_payload(**changes) -> dict:
    return {
        "verdict": "steady",
        "said": "8 canaries are as they were",
        "device_name": DEVICE,
        "source": "measured",
        "environment": OLD,
        "before": OLD,
        "runs": 8,
        "compared": [],
        "causes": [],
        "drift": None,
        **changes,
    }


def compared(label: str = "smact", moved: bool = False, **changes) -> dict:
    return {
        "family": "cnn",
        "config_hash": "c0ffee",
        "label": label,
        "unit": "ratio",
        "before": 0.5,
        "now": 0.9 if moved else 0.51,
        "tolerance": 0.05,
        "moved": moved,
        "history_runs": 4,
        "run_ids": ["canary-1"],
        "said": "",
        **changes,
    }


def learned(decision: str = "promoted", target: str = "memory", error: float = 100.0, **changes) -> dict:
    figures = {"rows": 80, "mean_abs_error": error, "median_rel_error": 0.03, "accuracy": 0.9, "above_bound": 0.01}
    return {
        "target": target,
        "estimator": "hybrid",
        "decision": decision,
        "why": f"{decision}: better by 4 %",
        "held_out": 80,
        "current": "v1",
        "candidate": "v2",
        "figures": {"current": {**figures, "mean_abs_error": error * 1.1}, "candidate": figures},
        **changes,
    }


def next_plan(**changes) -> dict:
    return {
        "policy": "active",
        "runs": 500,
        "families": {"cnn": 300, "gpt": 200},
        "pool": 10_000,
        "measured": 12,
        "repeated": 3,
        "bins_gained": {"memory": 1, "region": 1},
        "gained": {
            "memory": {"cnn 32-40 GB": [0, 7], "cnn 0-8 GB": [90, 2]},
            "smact": {},
            "region": {"gpt, depth 8-15, batch 4-15, parameters 1e8": [0, 4]},
        },
        "gpu_hours": 3.25,
        "from_past": 0.8,
        "out_of_memory": 41.3,
        "ways": {"fast": 500},
        "notes": ["a note of the plan"],
        **changes,
    }


@pytest.fixture
def nights(folder):
    return Nights(folder)


def written(nights, plan=None, outcome="done", sentence="", **steps):
    """(JSON, page) of the newest cycle's report; `steps`: payloads in place of the journal's."""
    cycles = nights.journal.cycles()
    changed = {key: dataclasses.replace(cycles[-1].steps[key], payload=value) for key, value in steps.items()}
    cycle = dataclasses.replace(cycles[-1], steps={**cycles[-1].steps, **changed}, outcome=outcome, said=sentence)
    path = write_report(nights.folder, cycle, cycles, None if plan is None else payload_of(ChoicePayload, plan))
    assert path == nights.folder.reports / f"{cycle.name}.html"
    report = json.loads(path.with_suffix(".json").read_text(), parse_constant=pytest.fail)
    return report, ParsedPage(path.read_text(encoding="utf-8"))


def test_a_good_night_says_what_it_brought_and_that_nothing_is_to_be_done(nights):
    nights.night([nights.run_row() for _ in range(4)], learned("first"))
    rows = [nights.run_row("cnn"), nights.run_row("gpt", peak_memory_mib=35_000.0)]
    rows.append(nights.failure("oom", family="gpt", oom_kind="device"))
    cycle = nights.night(rows, learned("kept", error=120.0), frozen=True)
    nights.write(nights.run_row("cnn"))  # after the snapshot, so that it is in no figure
    report, page = written(nights, plan=next_plan(), sentence="3 runs were measured (ok 2, oom 1); models: memory kept")
    summary = report["said"]
    assert (summary["level"], summary["advice"], report["snapshot"]) == ("good", ["Nothing to do."], cycle)
    counts = {(one["family"], one["status"]): (one["rows"], one["tonight"]) for one in report["rows"]["counts"]}
    assert counts == {("cnn", "ok"): (5, 1), ("gpt", "ok"): (1, 1), ("gpt", "oom"): (1, 1)}
    shown = (
        "The night is done: 3 runs were measured (ok 2, oom 1); models: memory kept.",
        "Nothing to do.",
        "Every check passed",
        "50.0 min",
        "0.25 kWh",
        "memory by hybrid: kept: kept: better by 4 %",
        "500 of 10,000 candidates (cnn: 300, gpt: 200)",
        "41 runs out of memory",
        "3.25 GPU-hours",
        "bins and regions that had no row: memory: 1, region: 1",
        "a note of the plan",
    )
    assert [text for text in shown if text not in page.text] == []


def test_the_nights_are_told_over_the_cycles(nights):
    for night, decision in enumerate(("first", "kept", "promoted")):
        nights.night([nights.run_row()], learned(decision, error=100.0 - night))
    report, page = written(nights)
    scores = [
        (one["cycle"], one["decision"], one["candidate"]["mean_abs_error"], one["in_use"]["mean_abs_error"])
        for one in report["scores"]
    ]
    assert scores == [
        ("2026-11-19", "first", 100.0, 100.0),
        ("2026-11-20", "kept", 99.0, pytest.approx(99.0 * 1.1)),
        ("2026-11-21", "promoted", 98.0, 98.0),
    ]
    assert report["nights"] == [
        {"cycle": f"2026-11-{19 + k}", "rows": 1 + k, "gpu_hours": 3000 / 3600, "energy_kwh": 0.25} for k in range(3)
    ]
    assert {step["name"]: step["seconds"] for step in report["steps"]}["run"] == 3600.0
    shown = ("Rows in all", "Time of the runs", "Energy of the runs", "70.0 min in all")
    shown += ("memory by hybrid: mean absolute error of the logarithm",)
    assert [text for text in shown if text not in page.text] == []


def test_other_peoples_text_is_shown_and_not_obeyed(nights):
    evil = "<script>alert('x')</script>\"'&amp;"
    traceback = (
        f'Traceback (most recent call last):\n  File "t.py", line 1\nRuntimeError: {evil}\n\x1b[31mred\x00{evil}'
    )
    nights.night(
        [
            nights.failure("crashed", traceback, error_type=evil, device_name=evil),
            nights.run_row(quality="untrusted", quality_reasons=json.dumps({evil: evil})),
            nights.run_row(quality="untrusted", quality_reasons="no json <b>"),
        ],
        learned("failed", target=evil, why=evil),
        findings=[{"rule": evil, "severity": "error", "count": 1, "examples": [evil], "said": evil}],
    )
    canaries = canaries_payload(
        verdict="drift",
        said=evil,
        device_name=evil,
        compared=[compared(evil, moved=True, family=evil, unit=evil)],
        drift={"operators": {evil: [evil]}, "moved": [evil]},
    )
    plan = next_plan(policy=evil, families={evil: 1}, gained={evil: {evil: [0, 1]}}, notes=[evil])
    _, page = written(nights, plan=plan, canaries=canaries)
    assert "script" not in page.tags and "h2" in page.tags
    assert page.text.count(evil) > 15 and "\x1b" not in page.text and "\0" not in page.text


def test_failures_are_grouped_by_what_happened_with_a_log_each(nights):
    def crash(number):
        return nights.failure(
            "crashed",
            f'Traceback (most recent call last):\n  File "trial.py", line {number}, in step\n    go()\n'
            f"ValueError: tensor {number} is lost\n--- the trial's output ends:\nlast words {number}",
            error_type="ValueError",
        )

    nights.night([nights.failure("crashed", "of another night")])
    nights.night([*map(crash, range(5)), nights.failure("timeout", "not done after trial.timeout_s=60 s")])
    report, page = written(nights)
    crashed, timeout = report["rows"]["failures"]
    assert (crashed["status"], crashed["runs"], crashed["said"]) == ("crashed", 5, "ValueError: tensor 0 is lost")
    assert len(crashed["run_ids"]) == 3 and "last words 0" in crashed["log"]
    assert (timeout["status"], timeout["runs"]) == ("timeout", 1)
    assert "6 runs of tonight" in page.text and "last words 0" in page.text
    assert report["said"]["level"] == "look" and "6 of 6 runs failed" in report["said"]["advice"][0]


def test_coverage_counts_a_row_in_its_bins_and_region(nights):
    known = {"smact": 0.5, "smocc": 0.05, "drama": 0.5}
    first = known | {"batch_size": 16, "parameters": 2_000_000, "peak_memory_mib": 3000.0, "smact": 0.95}
    nights.night([nights.run_row(**first)])
    tonight = (
        known | {"batch_size": 31, "parameters": 3_000_000, "peak_memory_mib": 4000.0},
        known | {"batch_size": 4, "parameters": 40_000_000, "peak_memory_mib": 39_000.0},
        {"batch_size": None, "peak_memory_mib": 3500.0, **dict.fromkeys(known)},
        {"source": "imported", "device_name": "V100-SXM2-32GB"},
    )
    nights.night([nights.run_row(**changes) for changes in tonight])
    report, page = written(nights)
    rows = report["rows"]
    grid = rows["memory"]
    memory = zip(grid["columns"], grid["counts"][0], grid["tonight"][0], strict=True)
    assert (rows["device_names"], rows["source"]) == ([DEVICE], "measured")
    assert [bin_ for bin_ in memory if bin_[1]] == [("2–4", 3, 2), ("32–40", 1, 1)]
    assert [grid["counts"][0] for grid in rows["levels"]] == [[0, 2, 1], [3, 0, 0], [0, 3, 0]]
    assert [region["counts"] for region in rows["regions"]] == [[[2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]]
    assert "10 of 12 cells empty" in page.text


def test_a_sick_machine_is_named_with_its_causes(nights):
    nights.night([nights.run_row()])
    cycle = nights.begin()
    payload = canaries_payload(
        verdict="sick",
        said="smact of 2 canaries moved",
        causes=["thermal slowdown"],
        compared=[compared(moved=True), compared("drama")],
    )
    nights.step(cycle, "canaries", payload)
    nights.journal.start(cycle, "report")
    report, page = written(nights, outcome="sick", sentence="smact of 2 canaries moved")
    assert (report["said"]["outcome"], report["said"]["level"]) == ("sick", "bad")
    assert "thermal slowdown" in report["said"]["advice"][0]
    assert "The machine is sick, and only canaries ran: smact of 2 canaries moved." in page.text
    assert [step["state"] for step in report["steps"]] == ["done", *["not reached"] * 4, "started"]


def test_a_folder_with_a_file_that_cannot_be_read_is_reported_without_its_rows(nights):
    nights.measured([nights.run_row()])
    (nights.folder.partition("runs", "cnn") / "torn.parquet").write_bytes(b"PAR1 torn")
    report, page = written(nights)
    assert sum(one["rows"] for one in report["rows"]["counts"]) == 1
    assert "torn.parquet" in report["notes"][0] and report["said"]["level"] != "good"
    assert "torn.parquet" in page.text and "could not be read" in page.text


def test_an_earlier_night_whose_records_cannot_be_read_is_noted_and_left_out(nights):
    nights.night([nights.run_row()], learned(held_out="many"))
    nights.night([nights.run_row()], learned("kept"))
    report, page = written(nights)
    assert [one["cycle"] for one in (*report["scores"], *report["nights"])] == ["2026-11-20"] * 2
    (note,) = report["notes"]
    assert "2026-11-19" in note and "'many' is not of type int" in note and note in page.text
    assert report["said"]["level"] == "good"


def test_errors_on_labels_that_the_model_s_own_trace_simulated_are_not_figures(nights):
    own = learned("first", error=0.0)
    own["figures"] = {"current": None, "candidate": {**own["figures"]["candidate"], "own_labels": True}}
    nights.night([nights.run_row(source="simulated")], own, learned("kept", target="drama", error=0.125))
    _, page = written(nights)
    section = page.texts[page.texts.index("Estimators over the cycles") :]
    assert "memory by hybrid: first: first: better by 4 %" in section
    assert "drama by hybrid: mean absolute error" in page.text, "whose labels are another's"
    assert "memory by hybrid: mean absolute error" not in page.text
