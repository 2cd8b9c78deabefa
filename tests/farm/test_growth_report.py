"""A growth cycle's report: what a person finds on the page in the morning, and a program in the JSON beside it."""

import dataclasses
import itertools
import json
import math
import re

import pytest
from growth_nights import DEVICE, ENVIRONMENT, Nights, canaries_payload, compared, learned, next_plan

from conf.plain_text import figure
from conf.reports.charts import Curve, Grid, columns, curves, heat_map
from farm.nights.journal import ChoicePayload, payload_of
from farm.nights.plan import choice_lines
from farm.nights.report import GROUPS_SHOWN, LOG_CHARACTERS
from farm.nights.report_page import write_report
from tests.parsed_page import ParsedPage
from warehouse.files.folder import DataFolder


@pytest.fixture
def nights(folder):
    return Nights(folder)


@pytest.fixture(scope="module")
def one_night(tmp_path_factory):
    """For tests that change a payload of the one night."""
    nights = Nights(DataFolder.resolve(tmp_path_factory.mktemp("growth") / "a'; echo foo").create())
    nights.night([nights.run_row()], learned("kept"))
    return nights


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
    cycle = nights.night(
        [
            nights.run_row("cnn"),
            nights.run_row("gpt", peak_memory_mib=35_000.0),
            nights.run_row(
                "gpt",
                status="oom",
                oom_kind="device",
                peak_memory_mib=None,
                smact=None,
                smocc=None,
                drama=None,
                steps=None,
            ),
        ],
        learned("kept", error=120.0),
    )
    report, page = written(nights, plan=next_plan(), sentence="3 runs were measured (ok 2, oom 1); models: memory kept")
    assert report["said"]["level"] == "good" and report["said"]["advice"] == ["Nothing to do."]
    assert report["snapshot"] == cycle and report["changed"]["rows_after"]["runs"] == 7
    counts = {(one["family"], one["status"]): (one["rows"], one["tonight"]) for one in report["rows"]["counts"]}
    assert counts == {("cnn", "ok"): (5, 1), ("gpt", "ok"): (1, 1), ("gpt", "oom"): (1, 1)}
    shown = (
        "The night is done: 3 runs were measured (ok 2, oom 1); models: memory kept.",
        "Nothing to do.",
        "gpt 32–40",
        "Every check passed",
        "50.0 min",
        "0.25 kWh",
        "kept: better by 4 %",
        "500 of 10,000 candidates (cnn: 300, gpt: 200)",
        "41 runs out of memory",
        "3.25 GPU-hours",
        "cnn 32-40 GB",
        "a note of the plan",
    )
    assert [text for text in shown if text not in page.text] == []


def test_the_nights_are_told_over_the_cycles_and_writing_again_gives_the_same(nights):
    for night, decision in enumerate(("first", "kept", "promoted")):
        nights.night([nights.run_row()], learned(decision, error=100.0 - night))
    report, page = written(nights)
    assert [one["decision"] for one in report["scores"]] == ["first", "kept", "promoted"]
    in_use = [one["in_use"]["mean_abs_error"] for one in report["scores"]]
    assert in_use == pytest.approx([100.0, 99.0 * 1.1, 98.0])
    assert [one["candidate"]["mean_abs_error"] for one in report["scores"]] == [100.0, 99.0, 98.0]
    assert report["scores"][1]["current"] == report["scores"][1]["in_use"]
    shown = ("memory by hybrid: mean absolute error of the logarithm", "promoted: better by 4 %")
    assert all(text in page.text for text in shown) and ("class", "k1 full") in page.attributes
    at = page.texts.index("memory by hybrid: accuracy")
    numbers = [text for text in page.texts[at : at + 20] if re.fullmatch(r"[\d.,]+", text.strip())]
    assert "100" in numbers and not {"120", "150", "200"} & set(numbers), "a share ends at 100 %"
    assert [night["cycle"] for night in report["nights"]] == ["2026-11-19", "2026-11-20", "2026-11-21"]
    newest = report["nights"][-1]
    assert (newest["overhead_s"], newest["seconds"]["run"], newest["rows"]) == (240.0, 3600.0, 3)
    assert newest["energy_j"] == 9.0e5
    assert "70.0 min in all, 4.0 min of it beside running and fitting" in page.text
    before = {path.name: path.read_bytes() for path in nights.folder.reports.iterdir()}
    assert sorted(before) == ["2026-11-21.html", "2026-11-21.json", "latest.html", "latest.json"]
    assert before["latest.html"] == before["2026-11-21.html"] and before["latest.json"] == before["2026-11-21.json"]
    written(nights)
    assert {path.name: path.read_bytes() for path in nights.folder.reports.iterdir()} == before


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
        environment={evil: evil},
        compared=[compared(evil, moved=True, family=evil, unit=evil)],
        drift={"operators": {evil: [evil]}, "stale_by_family": {evil: 3}, "moved": [evil]},
    )
    plan = next_plan(policy=evil, families={evil: 1}, gained={evil: {evil: [0, 1]}}, notes=[evil])
    _, page = written(nights, plan=plan, canaries=canaries)
    assert "script" not in page.tags and "b" in page.tags
    assert page.text.count(evil) > 20
    assert "\x1b" not in page.text and "\0" not in page.text


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
    groups = report["rows"]["failures"]
    assert [(one["status"], one["runs"]) for one in groups] == [("crashed", 5), ("timeout", 1)]
    assert groups[0]["said"] == "ValueError: tensor 0 is lost" and "last words 0" in groups[0]["log"]
    assert len(groups[0]["run_ids"]) == 3
    assert "6 runs of tonight" in page.text and "1 of earlier nights" in page.text and "last words 0" in page.text
    assert report["said"]["level"] == "look" and "6 of 6 runs failed" in report["said"]["advice"][0]


def test_many_kinds_of_failure_and_long_logs_are_cut_and_counted(nights):
    kinds = "abcdefghijklmnopqrst"
    nights.night([nights.failure("crashed", f"kind {kind}\n" + "x" * 300_000 + f" end {kind}") for kind in kinds])
    report, page = written(nights)
    assert len(report["rows"]["failures"]) == GROUPS_SHOWN and report["rows"]["failed_groups"] == len(kinds)
    log = report["rows"]["failures"][0]["log"]
    assert len(log) == LOG_CHARACTERS and log.endswith("end a")
    left = len(kinds) - GROUPS_SHOWN
    assert f"And {left} kinds of failure more, {left} runs" in page.text
    assert (nights.folder.reports / "latest.html").stat().st_size < 200_000


def test_untrusted_runs_are_counted_by_reason_and_cover_nothing(nights):
    reasons = json.dumps({"other_process": "pid 7 held 900 MiB", "power_cap": "half of the window"})
    doubted = nights.run_row("vit", quality="untrusted", quality_reasons=reasons, final=False, attempt=1)
    nights.night([doubted, nights.run_row("vit", quality="untrusted", quality_reasons=reasons), nights.run_row()])
    report, page = written(nights)
    assert {one["reason"]: one["runs"] for one in report["rows"]["doubts"]} == {"other_process": 2, "power_cap": 2}
    assert report["rows"]["doubted_tonight"] == 2 and report["rows"]["unusable"] == 1
    assert sum(report["rows"]["memory"]["counts"][report["rows"]["memory"]["rows"].index("vit")]) == 0
    assert "pid 7 held 900 MiB" in page.text


def test_coverage_counts_a_row_in_its_bins_and_region(nights):
    nights.night(
        [nights.run_row(batch_size=16, parameters=2_000_000, peak_memory_mib=3000.0, smact=0.95, smocc=0.05, drama=0.5)]
    )
    nights.night(
        [
            nights.run_row(
                batch_size=31, parameters=3_000_000, peak_memory_mib=4000.0, smact=0.5, smocc=0.05, drama=0.5
            ),
            nights.run_row(
                batch_size=4, parameters=40_000_000, peak_memory_mib=39_000.0, smact=0.5, smocc=0.05, drama=0.5
            ),
            nights.run_row(batch_size=None, peak_memory_mib=3500.0, smact=None, smocc=None, drama=None),
            nights.run_row(source="imported", device_name="V100-SXM2-32GB"),
        ]
    )
    report, page = written(nights)
    rows = report["rows"]
    assert (rows["device_names"], rows["source"], rows["no_place"]) == ([DEVICE], "measured", 1)
    grid = rows["memory"]
    memory = dict(zip(grid["columns"], zip(grid["counts"][0], grid["tonight"][0], strict=True), strict=True))
    assert {name: tuple(of) for name, of in memory.items() if of[0]} == {"2–4": (3, 2), "32–40": (1, 1)}
    assert memory["OOM"] == (0, 0)
    assert [grid["counts"][0] for grid in rows["levels"]] == [[0, 2, 1], [3, 0, 0], [0, 3, 0]]
    (region,) = rows["regions"]
    assert region["rows"] == ["16–31", "8–15", "4–7"] and region["columns"] == ["1M", "3.2M", "10M", "32M"]
    assert region["counts"] == [[2, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 1]]
    assert report["gained"]["peak memory [GiB]"] == ["cnn 32–40"]
    assert "10 of 12 cells empty" in page.text and "cnn 32–40" in page.text
    assert "gpt" in rows["absent_families"] and "cnn" not in rows["absent_families"]


def test_labels_that_moved_in_the_same_environment_are_told(nights):
    again = {"config_hash": "again", "config": '{"family":"cnn"}', "smact": 0.5, "smocc": 0.3, "drama": 0.3}
    nights.night([nights.run_row(**again, peak_memory_mib=1000.0)])
    nights.night([nights.run_row(**again, peak_memory_mib=1500.0)])
    report, page = written(nights)
    (shift,) = [one for one in report["changed"]["shifts"] if one["beyond"]]
    assert shift["label"] == "peak_memory_mib" and math.isclose(shift["largest"], 0.5)
    assert "+50.0%" in page.text and report["said"]["level"] == "look"


def test_broken_checks_are_told_first(nights):
    nights.night([nights.run_row(smact=0.2, smocc=0.9)], findings=None)
    report, page = written(nights)
    assert [one["rule"] for one in report["findings"]] == ["impossible.smocc_over_smact"]
    assert "impossible.smocc_over_smact" in report["said"]["advice"][0] and report["said"]["level"] == "look"
    assert "SM occupancy above SM activity" in page.text


def test_of_many_broken_rules_three_are_named(one_night):
    broken = [{"rule": f"rule {k}", "severity": "error", "count": 2, "examples": [], "said": ""} for k in range(4)]
    landed = {**one_night.journal.cycles()[-1].done("land"), "findings": broken}
    report, _ = written(one_night, land=landed)
    assert "rules are broken 8 times (rule 0, rule 1, rule 2, 1 more)" in report["said"]["advice"][0]


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
    shown = (
        "The machine is sick, and only canaries ran: smact of 2 canaries moved.",
        "+0.4",
        "needs somebody",
        "All 2 labels of 1 canary configuration",
    )
    assert [text for text in shown if text not in page.text] == []
    assert page.text.index("Canaries and drift") < page.text.index("What changed tonight")
    assert [step["state"] for step in report["steps"]] == ["done", *["not reached"] * 4, "started"]


def test_drift_tells_what_moved_and_what_it_makes_stale(one_night):
    drift = {
        "operators": {"step_time_ms": ["convolution"]},
        "stale_rows": 1234,
        "stale_by_family": {"unet": 34, "cnn": 1200},
        "stale_by_operator": {"convolution": 1234},
        "remeasure": 88,
        "moved": ["step_time_ms of cnn: 10 -> 14 ms"],
    }
    before = {**ENVIRONMENT, "torch_version": "2.5.1"}
    payload = canaries_payload(verdict="drift", before=before, drift=drift, compared=[compared(moved=True)])
    report, page = written(one_night, canaries=payload)
    assert report["canaries"]["drift"] == drift and report["said"]["level"] == "look"
    shown = (
        "Labels changed with the environment",
        "1,234 rows",
        "88 configurations",
        "2.5.1",
        "cnn 1,200 unet 34",
        "step_time_ms of cnn: 10 -> 14 ms",
    )
    assert [text for text in shown if text not in page.text] == []


def test_a_night_without_a_snapshot_is_reported_from_the_folder_as_it_is(nights):
    nights.night([nights.run_row()])
    cycle = nights.begin()
    nights.measured(cycle, [nights.run_row("gpt"), nights.run_row("gpt")], ended="asked")
    report, page = written(nights, outcome="cut short")
    assert report["snapshot"] is None and report["before"] == "2026-11-19" and report["changed"]["after"] == "now"
    assert {one["family"]: one["tonight"] for one in report["rows"]["counts"]} == {"cnn": 0, "gpt": 2}
    assert "the night was not landed" in page.text and "was cut short" in page.text
    _, page = written(nights, run=nights.journal.cycles()[-1].done("run") | {"ended": "time"})
    assert "the night was not landed" in page.text and "was cut short" not in page.text


def test_a_failed_step_is_told_with_its_error(nights):
    cycle = nights.begin()
    nights.measured(cycle, [nights.run_row()])
    nights.journal.start(cycle, "land")
    error = 'Traceback (most recent call last):\n  File "a.py", line 3, in land\n    go()\nOSError: no space <left>'
    nights.journal.fail(cycle, "land", error)
    report, page = written(nights, outcome="failed", sentence="land failed: OSError: no space <left>")
    assert (report["said"]["outcome"], report["said"]["level"]) == ("failed", "bad")
    assert report["said"]["advice"][0] == "Fix it, and run the same command again."
    assert "The cycle failed: land failed: OSError: no space <left>." in page.text
    assert 'File "a.py", line 3' in page.text and "rows tonight 1 1 in all" in page.text


def test_a_folder_with_a_file_that_cannot_be_read_is_reported_without_its_rows(nights):
    cycle = nights.begin()
    nights.measured(cycle, [nights.run_row()])
    (nights.folder.partition("runs", "cnn") / "torn.parquet").write_bytes(b"PAR1 torn")
    report, page = written(nights)
    assert sum(one["rows"] for one in report["rows"]["counts"]) == 1
    assert "torn.parquet" in report["notes"][0] and report["said"]["level"] != "good"
    assert "torn.parquet" in page.text and "could not be read" in page.text


def test_an_earlier_night_whose_records_cannot_be_read_is_noted_and_left_out(nights):
    nights.night([nights.run_row()], learned(held_out=3.0))
    nights.night([nights.run_row()], learned("kept"))
    report, page = written(nights)
    assert [score["cycle"] for score in report["scores"]] == ["2026-11-20"]
    assert [night["seconds"]["learn"] for night in report["nights"]] == [360.0, 360.0]
    (note,) = report["notes"]
    assert "2026-11-19" in note and "held_out must be" in note and note in page.text
    assert report["said"]["level"] == "good"


def test_the_reason_at_the_end_of_a_long_sentence_is_kept(one_night):
    report, page = written(one_night, sentence="5 runs; " + "cause " * 100 + "the reason")
    assert report["said"]["sentence"].endswith("the reason.") and "the reason." in page.text


@pytest.mark.parametrize("canaries", [None, {"device_name": None, "source": None}])
def test_coverage_of_an_unknown_machine_is_of_the_device_with_most_rows_tonight(nights, canaries):
    nights.begin()
    nights.write(*(nights.run_row(device_name="NVIDIA T4", source="imported") for _ in range(3)))
    cycle = nights.begin()
    if canaries is not None:
        nights.step(cycle, "canaries", canaries_payload(**canaries))
    nights.write(nights.run_row("gpt"), nights.run_row("gpt", device_name=DEVICE.removeprefix("NVIDIA ")))
    report, _ = written(nights, outcome="failed", sentence="canaries failed")
    rows = report["rows"]
    assert (rows["device_names"], rows["source"]) == ([DEVICE.removeprefix("NVIDIA "), DEVICE], "measured")
    assert rows["memory"]["rows"] == ["gpt"] and sum(rows["memory"]["counts"][0]) == 2


def test_a_snapshot_that_is_gone_is_replaced_by_the_folder_as_it_is(nights):
    cycle = nights.night([nights.run_row()])
    (nights.folder.snapshots / cycle / "manifest.json").unlink()
    report, _ = written(nights)
    assert report["snapshot"] is None and cycle in report["notes"][0]
    assert sum(one["rows"] for one in report["rows"]["counts"]) == 1


def test_a_folder_without_runs_has_a_report(nights):
    nights.begin()
    report, page = written(nights)
    assert report["rows"]["counts"] == [] and report["rows"]["source"] == "" and report["changed"] is None
    shown = ("There is no run yet", "No canary was compared", "No dry run")
    assert [text for text in shown if text not in page.text] == []


def test_a_plan_of_stale_rows_only_has_no_summary(one_night):
    report, page = written(one_night, plan={"runs": 12, "remeasured": 12, "next_index": {}, "gpu_hours": math.inf})
    assert report["next_plan"]["gpu_hours"] is None, "JSON knows no infinity"
    assert "12 runs. 12 of them were measured before, and are stale since." in page.text


TEXT = re.compile(r'<text class="([^"]*)" x="([\d.]+)" y="([\d.]+)" text-anchor="(\w+)">([^<]*)')


def overlapping(svg: str) -> list[tuple[str, str]]:
    """Pairs of texts of one line, by their places and a usual letter's width."""
    boxes = []
    for _, x, y, anchor, text in TEXT.findall(svg):
        width = len(text) * 6.5
        left = float(x) - {"middle": width / 2, "end": width, "start": 0.0}[anchor]
        assert left >= -1, text
        boxes.append((round(float(y)), left, left + width, text))
    boxes.sort()
    return [(a[3], b[3]) for a, b in itertools.pairwise(boxes) if a[0] == b[0] and b[1] < a[2]]


@pytest.mark.parametrize("count", [1, 2, 7, 40])
def test_names_and_figures_of_many_cycles_do_not_overlap(count):
    names = [f"2026-{1 + k // 28:02d}-{1 + k % 28:02d}" + (".12" if k % 5 == 4 else "") for k in range(count)]
    values = [None if k == 3 else 12345.678 / (k + 1) for k in range(count)]
    lines = [Curve(name="in use", css="k1", values=values)]
    for svg in (curves(names, lines, "MiB"), columns(names, {"run": ("k1", [v or 0.0 for v in values])}, "min")):
        assert not overlapping(svg)
        assert names[-1][5:] in svg and figure(values[-1]) in svg
        assert "nan" not in svg


def test_curves_are_drawn_without_any_value_and_end_at_the_most_that_there_can_be():
    assert "nan" not in curves(["2026-11-20"], [Curve(name="x", css="k1", values=[None])], "h")
    assert "nan" not in curves([], [], "h") + columns([], {}, "h")
    assert ">200<" not in curves(["2026-11-20"], [Curve(name="in use", css="k1", values=[97.0])], "%", most=100.0)
    assert ">150<" in curves(["2026-11-20"], [Curve(name="in use", css="k1", values=[101.0])], "%")


def test_a_heat_map_of_many_families_and_bins_has_room_for_its_texts():
    families = [f"a long family {k}" for k in range(13)]
    bins = [f"{8 * k}–{8 * k + 8}" for k in range(18)]
    counts = tuple(tuple(10 ** (k % 7) * ((i + k) % 3) for k in range(18)) for i in range(13))
    svg = heat_map(
        Grid(name="memory", rows=tuple(families), columns=tuple(bins), counts=counts, tonight=counts), "family", "GiB"
    )
    assert not overlapping(svg)
    assert svg.count('class="h0"') == sum(count == 0 for row in counts for count in row)
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())
    assert all(float(x) <= width and float(y) <= height for _, x, y, _, _ in TEXT.findall(svg))


def test_a_simulated_night_speaks_of_no_measurement_no_gpu_time_and_no_energy(nights):
    cycle = nights.begin()
    nights.measured(cycle, [nights.run_row(source="simulated")])
    nights.step(cycle, "canaries", canaries_payload() | {"source": "simulated"})
    nights.landed(cycle)
    report, page = written(nights, plan=next_plan())
    assert report["nights"][-1]["simulated"]
    shown = ("simulated: no GPU was used", "Time of the simulated runs: 50.0 min; no GPU was used")
    absent = ("measured", "GPU time", "GPU-hours", "nergy", "kWh")
    assert [text for text in (*shown, *absent) if text in page.text] == [*shown]


def test_no_header_is_the_name_of_a_column_of_the_code(one_night):
    payload = one_night.journal.cycles()[-1].done("learn")
    for result in payload["results"]:
        for of in result["figures"].values():
            of |= {"out_of_memory": 3, "some_new_figure": 1.0}
    _, page = written(one_night, learn=payload)
    assert "rows out of memory" in page.text and "some new figure" in page.text
    assert "out_of_memory" not in page.text and "some_new_figure" not in page.text


def test_errors_on_labels_that_the_model_s_own_trace_simulated_are_not_figures(nights):
    own = learned("first", error=0.0)
    own["figures"] = {"current": None, "candidate": {**own["figures"]["candidate"], "own_labels": True}}
    nights.night([nights.run_row(source="simulated")], own, learned("kept", target="drama", error=0.125))
    _, page = written(nights)
    section = page.texts[page.texts.index("Estimators over the cycles") :]
    assert "– / not informative" in section and "– / 0" not in section
    assert "drama by hybrid: mean absolute error" in page.text, "whose labels are another's"
    assert "memory by hybrid: mean absolute error" not in page.text
    assert "memory by hybrid: accuracy" not in page.text
    assert "own labels" not in page.text


def test_a_grids_row_names_lie_inside_the_picture_in_a_wide_font():
    """DejaVu Sans, which a page falls back to where there is no system font, has digits of 7.64 pixels at 12."""
    names = ("16384–32767", "8192–16383")
    svg = heat_map(Grid(name="dlrm", rows=names, columns=("1M",), counts=((1,), (0,)), tonight=((0,), (0,))), "batch")
    ends = [float(x) for x in re.findall(r'class="name" x="([\d.]+)" y="[\d.]+" text-anchor="end"', svg)]
    assert len(ends) == 2 and all(end >= len(names[0]) * 7.64 for end in ends)


CHOICE = ChoicePayload(
    policy="coverage",
    runs=6,
    families={"mlp": 6},
    pool=40,
    measured=3,
    repeated=1,
    bins_gained={},
    gained={},
    gpu_hours=0.25,
    from_past=0.0,
    out_of_memory=1.0,
    ways={"fast": 6},
    notes=(),
)


@pytest.mark.parametrize(
    ("source", "shown", "absent"),
    [
        ("simulated", ["3 simulated already", "0.25 hours of simulated runs"], ["measured", "GPU"]),
        ("measured", ["3 measured already", "0.25 GPU-hours"], []),
    ],
)
def test_only_a_plan_of_measured_runs_speaks_of_measurements_and_gpu_hours(source, shown, absent):
    text = "\n".join(choice_lines(CHOICE, source))
    assert [words for words in (*shown, *absent) if words in text] == shown
