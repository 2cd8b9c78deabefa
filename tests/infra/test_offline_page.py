"""The page of a lent GPU's results: every kind of result, what is missing, what to refit, and rows for the data set."""

import shutil

import pytest

from conf.overrides import load_settings
from farm.cluster_settings import ClusterSettings
from farm.jobs import Queue
from farm.settings import SubmitSettings
from farm.submit import submit
from farm.work import work as run_tasks
from featurize.families import cnn, mlp
from infra.offline import page
from infra.offline.page import make_page, read_results
from infra.offline.results import Series, pack
from learn.evaluation.estimated_runs import estimated_runs, spread_of
from tests.infra.lent_results import CONTEXT_MIB, SHIFTS, planted_work
from tests.parsed_page import ParsedPage
from warehouse.folder import DataFolder
from warehouse.writer import RunWriter

CONFIGS = [
    *(mlp.Config(batch_size=32, input_size=256 * k, depth=2, classes=10) for k in range(1, 6)),
    mlp.Config(batch_size=32, input_size=256, depth=2, classes=10, parallel="ddp=2"),
    cnn.Config(batch_size=8, image_size=32, channels=3, classes=10, base_filters=8, depth=2),
]


def made(capsys, *arguments):
    """Exit code, and what was printed on both streams."""
    code = page.exit_code(lambda: page.run(arguments))
    printed = capsys.readouterr()
    return code, printed.out, printed.err


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    histories = {"equal": {}, "larger": {"scale_workspace": 6.0}}
    return planted_work(tmp_path_factory.mktemp("planted") / "work", CONFIGS, histories=histories)


@pytest.fixture(scope="module")
def of_planted(planted):
    """The results and, by name, what the page's sections say."""
    return read_results(planted)


@pytest.fixture
def shown(of_planted, tmp_path):
    """The page as HTML, and the summary."""
    made_page, lines = make_page(of_planted, str(tmp_path / "sets"))
    return page.render_page(made_page), lines


def test_every_kind_of_result_is_on_the_page(shown):
    html, lines = shown
    text = ParsedPage(html).text
    assert "cannot be shown" not in text and "not measured these figures" not in text
    for words in (
        "Measured on NVIDIA H100 80GB HBM3",
        "estimates for H100-SXM5-80GB",
        "Errors of process memory by cause",
        "2 jobs recorded",
        "workspaces 1",
        "Machine profiles",
        "conv2d forward",
        "by CUPTI",
        "aten::addmm 7",
        "TF32 changes nothing there",
        "GPM is not supported",
        "test_ranks: one GPU",
        "nvml, power 9 1.020",
        "10.0 x on 1 trials",
        "hybrid (default)",
    ):
        assert words in text, words
    absent = [line for line in lines if "have no" in line]
    assert [line.partition(":")[0] for line in absent] == []
    assert "nvml 11 no permission" in text and "ok trusted 11" in text
    assert "mps 2 3.00" in text and "ddp=2 1" in text
    assert html.count("<svg") > 10


def test_errors_of_memory_are_put_down_to_their_causes(of_planted):
    for one in of_planted.runs.solo:
        assert one.causes_mib == pytest.approx({"tensors": 0, "allocator": 0, "context": -CONTEXT_MIB}, abs=0.01)
    assert spread_of(of_planted.runs.solo, "allocated").p90 == pytest.approx(0, abs=1e-6)
    step_time = spread_of(of_planted.runs.solo, "step_time")
    assert step_time.bias == pytest.approx(1 / SHIFTS["step_time_ms"] - 1)


def test_what_is_off_is_listed_with_its_command(shown, planted):
    _, lines = shown
    text = "\n".join(lines)
    assert f"python -m learn.calibrate measured={planted}/probes/numbers.csv device=H100-SXM5-80GB" in text
    assert "step time, ms: mlp -33.3% (7 runs)" in text
    assert f"python -m learn.fit_kernels data={planted}/data out=parameters.json" in text
    assert "power" not in text.partition("to refit")[2].partition("data set")[0], "it is off by 5 %"
    assert "cnn" not in text.partition("to refit")[2].partition("data set")[0], "one run says nothing"


def test_measured_rows_go_to_the_data_set_with_their_card_and_once(of_planted, tmp_path):
    sets = tmp_path / "sets"
    _, lines = make_page(of_planted, str(sets))
    assert "11 runs added" in lines[-1] and "NVIDIA H100" in (sets / "README.md").read_text()
    _, lines = make_page(of_planted, str(sets))
    assert "0 runs added, 11 were there already" in lines[-1]


def test_what_is_missing_is_said_in_a_line_each_and_what_is_damaged_costs_its_section_alone(planted, tmp_path, capsys):
    work = tmp_path / "work"
    shutil.copytree(planted / "probes", work / "probes")
    (work / "probes" / "context.json").write_text('[{"name": "context')
    (work / "probes" / "questions.json").write_text("[1]")
    code, summary, _ = made(capsys, f"results={work}", f"out={tmp_path / 'out'}")
    assert code == 0
    lines = (
        "Memory: The results hold no runs",
        "Contexts: context.json cannot be read",
        "Calls: The results have no",
        "Questions: cannot be shown",
        "Kernels: The results have no data folder",
        "no runs, so nothing",
    )
    for line in lines:
        assert line in summary
    assert "conv2d forward" in ParsedPage((tmp_path / "out" / "page.html").read_text()).text


def test_simulated_results_are_named_so_and_are_exported_only_where_datasets_says(tmp_path, capsys):
    work = tmp_path / "work"
    data = DataFolder.resolve(work / "data").create()
    settings = load_settings(SubmitSettings, "submit", ["+arch=mlp", "n=2", "device=simulated", "kernels.steps=1"])
    with Queue.open(data.queue) as queue:
        submit(data, queue, settings)
        run_tasks(data, queue, ClusterSettings(kind="inline"))
    code, summary, _ = made(capsys, f"results={work}", f"out={tmp_path / 'out'}")
    assert code == 0 and "note: Simulated" in summary and "nothing is exported" in summary
    assert "allocated memory, MiB: +0.0% / 0.0% (2 runs)" in summary and "to refit" not in summary
    text = ParsedPage((tmp_path / "out" / "page.html").read_text()).text
    assert "the device was simulated" in text and "no GPU measured these figures" in text
    code, summary, _ = made(capsys, f"results={work}", f"out={tmp_path / 'out'}", f"datasets={tmp_path / 'sets'}")
    assert "2 runs added" in summary and "simulated" in (tmp_path / "sets" / "README.md").read_text()


def test_runs_that_have_no_estimate_are_counted_with_their_reason(tmp_path):
    data = DataFolder.resolve(tmp_path / "data").create()
    known = {"family": "mlp", "source": "measured", "device_name": "NVIDIA H100 80GB HBM3", "device_uuid": "GPU-1"}
    rows = [
        {**known, "status": "crashed"},
        {**known, "status": "ok", "quality": "untrusted"},
        {**known, "status": "ok", "config": '{"family": "mlp", "depth": 0}'},
        {**known, "status": "ok", "device_name": "Voodoo 2"},
    ]
    numbered = [{**row, "run_id": f"r{k}", "job_id": "j", "task_index": k, "attempt": 1} for k, row in enumerate(rows)]
    RunWriter(data).write_batch(numbered)
    without = estimated_runs(data.root)
    assert not without.runs and sum(without.left_out.values()) == 4
    reasons = " | ".join(without.left_out)
    for words in ("status crashed", "untrusted", "mlp: ", "no description of Voodoo 2"):
        assert words in reasons


def test_packed_results_are_unpacked_once_and_those_of_another_call_are_not_mixed_in(planted, tmp_path, capsys):
    work, results, out = tmp_path / "work", tmp_path / "results", tmp_path / "out"
    Series.begun(work)
    shutil.copy(planted / "tests.json", work)
    results.mkdir()
    pack(work, results)
    for _ in range(2):
        code, summary, _ = made(capsys, f"results={results}", f"out={out}")
        assert code == 0 and "Tests:" not in summary and (out / "work" / "tests.json").is_file()
    pack(work, results)
    code, _, error = made(capsys, f"results={results}", f"out={out}")
    assert code == 2 and "name another out=" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "results=DIR is missing"),
        (["results={empty}/none"], "is no folder"),
        (["results={empty}"], "holds no results"),
        (["results={empty}", "out={empty}/file"], "is a file, not a folder"),
        (["folder=x"], "valid are KEY=VALUE of results, out, datasets"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(tmp_path, capsys, arguments, words):
    empty = tmp_path / "empty"
    empty.mkdir()
    if "out" in str(arguments):
        (empty / "file").touch()
    given = [text.format(empty=empty) for text in arguments]
    if not any(text.startswith("out") for text in given) and given[:1] != ["folder=x"]:
        given.append(f"out={tmp_path / 'out'}")
    code, _, error = made(capsys, *given)
    assert code == 2 and words in error and len(error.splitlines()) == 1
    assert not (tmp_path / "out").exists()
