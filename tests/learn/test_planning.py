"""`learn.plan`: which layouts of a job on several GPUs fit, how quick they are, and how that is shown."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn

from conf.errors import UsageError
from featurize.device.device_spec import describe_device
from featurize.families import mlp
from featurize.job.layout import Parallel
from featurize.job.training_settings import Training
from learn import PlanRow, estimate, plan
from learn.planning import meshes
from learn.planning.plans import Findings, plan_page
from tests.featurize.rank_nets import WIDTH as EXPERTS_WIDTH, Chosen
from tests.featurize.small_nets import Block, Computes
from tests.parsed_page import ParsedPage

WIDTH = 1024
CARD = replace(describe_device("A100-SXM4-40GB"), memory_mib=3000.0)


def net(blocks=4):
    return nn.Sequential(
        *(Block(WIDTH, norm=False, activation=torch.relu) for _ in range(blocks)), nn.Linear(WIDTH, 10)
    )


def planned(gpus=8, model=net, batch=1024, inputs=None, **options):
    """A plan of replicas alone, which show what all modes have in common, or of other modes."""
    return plan(model, inputs or [batch, WIDTH], gpus=gpus, **{"device": CARD, "modes": "ddp", **options})


@pytest.fixture(scope="module")
def eight():
    return planned(batch=4096)


# -- rows


def test_a_row_is_the_estimate_of_its_layout(eight):
    of_each_way = {row.checkpointing: row for row in eight.fitting}
    assert set(of_each_way) == {None, "full"}
    for row in of_each_way.values():
        done = estimate(
            net, [row.micro_batch, WIDTH], device=CARD, parallel=row.parallel, checkpointing=row.checkpointing
        )
        assert done.fits_device
        for name in ("peak_memory_mib", "upper_mib", "step_time_ms", "exposed_ms", "samples_per_s"):
            assert getattr(row, name) == pytest.approx(getattr(done, name)), name


def test_batches_double_until_they_do_not_fit_and_checkpointing_begins_at_the_largest_without(eight):
    for way in (None, "full"):
        rows = sorted((row for row in eight.rows if row.checkpointing == way), key=lambda row: row.micro_batch)
        sizes = [row.micro_batch for row in rows]
        assert sizes == [sizes[0] << step for step in range(len(sizes))] and len(sizes) > 1
        assert [row.fits for row in rows] == [True] * (len(rows) - 1) + [False] and rows[-1].why
    without = max(row.micro_batch for row in eight.fitting if row.checkpointing is None)
    assert min(row.micro_batch for row in eight.rows if row.checkpointing == "full") == without
    assert max(row.micro_batch for row in eight.fitting) > 4096
    assert {row.mesh for row in eight.rows} == {"ddp=8"}


def test_the_quickest_comes_first_what_does_not_fit_last_and_nothing_is_quicker_with_less_than_the_frontier(eight):
    rates = [row.samples_per_s for row in eight.fitting]
    assert rates == sorted(rates, reverse=True) and eight.best == eight.rows[0] == eight.fitting[0]
    assert [row.fits for row in eight.rows] == sorted((row.fits for row in eight.rows), reverse=True)
    assert all(row.samples_per_s is None for row in eight.rows if not row.fits)
    for row in eight.fitting:
        better = [o for o in eight.fitting if o.samples_per_s > row.samples_per_s and o.needed_mib < row.needed_mib]
        assert (row in eight.frontier) == (not better)
    assert len(eight.frontier) > 1 and eight.best in eight.frontier


def test_a_global_batch_is_split_into_micro_steps():
    done = planned(global_batch=64 * 1024, checkpointing="none")
    assert {row.micro_batch * row.accumulation * 8 for row in done.rows} == {64 * 1024}
    (row,) = (one for one in done.rows if one.accumulation == 8)
    whole = estimate(net, [row.micro_batch, WIDTH], device=CARD, parallel="ddp=8", accumulation=8)
    assert (row.upper_mib, row.step_time_ms) == (whole.upper_mib, pytest.approx(whole.step_time_ms, rel=1e-3))


def test_a_layout_whose_replicas_do_not_divide_the_batch_cannot_be():
    done = planned(gpus=[8, 16], global_batch=8 * 1024 + 8, batch=512, checkpointing="none")
    (refused,) = (row for row in done.rows if row.fits is None)
    assert refused.mesh == "ddp=16" and "8,200 samples do not divide over 16 replicas" in refused.why
    assert {row.micro_batch for row in done.fitting} == {1}  # of 1,025 samples


def test_a_model_without_blocks_is_planned_without_checkpointing():
    done = planned(model=lambda: nn.Linear(WIDTH, 10), batch=8, global_batch=64)
    recomputed = [row for row in done.rows if row.checkpointing == "full"]
    assert done.fitting and recomputed and all("repeated blocks" in row.why for row in recomputed)


@pytest.mark.needs_mode("fsdp")
def test_blocks_that_repeat_are_traced_once():
    device = replace(CARD, memory_mib=4200.0)
    options = {"modes": ["ddp", "fsdp"], "checkpointing": "none", "device": device}
    done = planned(gpus=2, model=partial(net, 9), batch=4096, **options)
    rows = {row.mesh: [one for one in done.rows if one.mesh == row.mesh] for row in done.rows}
    assert {row.known for row in rows["ddp=2"]} <= {"traced", None}
    chosen = [row for row in rows["fsdp=2"] if row.known == "extrapolated"]
    assert chosen and any("traced with 4 and 5 of 9 blocks" in note for note in done.notes)
    for row in (chosen[0], chosen[-1]):
        whole = estimate(partial(net, 9), [row.micro_batch, WIDTH], device=device, parallel=row.parallel)
        assert (row.peak_memory_mib, row.upper_mib) == (whole.peak_memory_mib, whole.upper_mib)
        if row.fits:
            assert row.step_time_ms == pytest.approx(whole.step_time_ms, rel=0.01)
            assert row.exposed_ms == pytest.approx(whole.exposed_ms, rel=0.01)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"gpus": 1}, "gpus must be a whole number from 2 to 65536, or several, got 1"),
        ({"gpus": 0}, "gpus must be a whole number from 2"),
        ({"gpus": []}, "gpus names no number"),
        ({"gpus": "many"}, "gpus must be a whole number .*got 'many'"),
        ({"gpus": 12}, "12 ranks do not fill nodes of 8"),
        ({"parallel": "ddp=4"}, "plan chooses the degrees: leave ddp out"),
        ({"parallel": "hsdp=16"}, "plan chooses the degrees: leave hsdp out"),
        ({"parallel": "schedule=gpipe,cp_rotate=x"}, "cp_rotate: of no layout that plan tries, which have"),
        ({"parallel": "reduce_bucket_size=1000"}, "reduce_bucket_size: of no layout that plan tries"),
        pytest.param(
            {"parallel": "param_dtype=f8"},
            "param_dtype must be one of fp32, bf16, fp16",
            marks=pytest.mark.needs_mode("fsdp"),
        ),
        ({"parallel": {"tp": 4}}, "plan chooses the degrees: leave tp out"),
        ({"parallel": "color=red"}, "unknown 'color'"),
        ({"parallel": {"deepspeed": {}}}, "give zero and its settings, not deepspeed"),
        ({"parallel": 8}, "parallel is text or a mapping"),
        ({"parallel": "micro_batches=8"}, "plan chooses micro_batches"),
        ({"modes": ["zp"]}, "unknown mode of a plan 'zp'; known: cp, ddp, ep, fsdp, pp, tp"),
        ({"modes": ["fsdp", "ep"]}, "modes: ep: the model has no experts of a known kind"),
        ({"modes": []}, r"modes must be names of modes, as in modes=\[ddp,fsdp,tp\], got \[\]"),
        ({"modes": 3}, "modes must be names of modes, .*, got 3"),
        ({"global_batch": 0}, "global_batch must be a whole number >= 1, got 0"),
        ({"global_batch": 64, "accumulation": 4}, "global_batch decides"),
        ({"checkpointing": "some"}, "unknown checkpointing 'some'; known: full, none, selective"),
        ({"checkpointing": []}, "checkpointing names nothing"),
        ({"checkpointing": "full", "settings": Training(checkpointing="full")}, "given twice"),
        ({"method": "fast"}, "method: of one estimate only"),
        ({"estimator": "horus"}, "no layout is possible: .*: estimator=horus knows one GPU"),
        ({"colour": 1}, "unknown keyword 'colour'"),
        ({"device": "A100-SXM4-40GB:3g.20gb"}, "no layout is possible: .*has no interconnect"),
        (
            {"model": mlp.Config(batch_size=8, input_size=8, classes=2, depth=2)},
            "plan takes an nn.Module or a factory of one, and no trial config",
        ),
        ({"model": 5}, "got int"),
        ({"target": [7]}, "only a first dimension of 1024 or 1 can be scaled"),
        ({"report": "/nope/plan.html"}, "there is no folder /nope"),
    ],
)
def test_a_wrong_value_is_refused(options, problem):
    with pytest.raises(UsageError, match=problem):
        planned(**{"modes": None, **options})


# -- what is tried


@pytest.mark.needs_mode("pp")
def test_a_pipeline_is_planned_with_its_micro_batches_in_one_schedule():
    done = planned(gpus=2, modes=["pp"], batch=4096, checkpointing="none")
    assert {row.mesh for row in done.rows} == {"pp=2"} and {row.accumulation for row in done.rows} == {8}
    best = done.best
    layout, batch = best.parallel.changed(micro_batches=8), [8 * best.micro_batch, WIDTH]
    again = estimate(net, batch, device=CARD, parallel=layout)
    assert (best.peak_memory_mib, best.upper_mib) == (again.peak_memory_mib, again.upper_mib)
    assert best.step_time_ms == pytest.approx(again.step_time_ms)
    assert best.samples_per_s == pytest.approx(again.samples_per_s)


@pytest.mark.needs_mode("pp")
def test_a_pipeline_that_its_bubble_makes_slower_is_not_traced():
    done = planned(gpus=4, modes=["ddp", "pp"], batch=4096, checkpointing="none")
    reasons = {row.mesh: row.why for row in done.rows if row.parallel.degrees.pp > 1 and not row.fits}
    assert "slower than the best without pp" in reasons["pp=4"] and done.best.mesh == "ddp=4"


@pytest.mark.needs_mode("pp")
def test_all_degrees_that_multiply_to_the_gpus_are_tried():
    layouts, notes = meshes.meshes_of(64, {})
    assert {one.ranks for one in layouts} == {64} and max(one.degrees.tp for one in layouts) == 8
    pipelines = [one for one in layouts if one.degrees.pp > 1]
    layouts = [one for one in layouts if one.degrees.pp == 1]
    assert len(layouts) == 7 + 5 + 4 + 3  # tp of 1, 2, 4 and 8, which goes with ddp only where fsdp is there, too
    assert {one.degrees.pp for one in pipelines} == {2, 4, 8, 16, 32, 64} and all(
        1 in (one.degrees.ddp, one.degrees.fsdp) for one in pipelines
    )
    assert any("ddp with tp needs fsdp" in note for note in notes)
    assert "tp over more than the 8 GPUs of a node is left out" in notes
    assert layouts[0] == Parallel(fsdp=64) and layouts[7 - 1] == Parallel(ddp=64)
    assert layouts[-1] == Parallel(ddp=4, fsdp=2, tp=8)


@pytest.mark.needs_mode("fsdp")
def test_a_model_with_experts_is_planned_with_ep():
    def mix(net, x):
        weights, index = net.router(x).softmax(-1).topk(1)
        return x + net.experts(x, index, weights)

    def mixing():
        return Computes(mix, router=nn.Linear(EXPERTS_WIDTH, 4), experts=Chosen(4))

    model, inputs = lambda: nn.Sequential(mixing(), mixing()), [1024, EXPERTS_WIDTH]
    done = planned(gpus=2, model=model, inputs=inputs, checkpointing="none", global_batch=2048, modes=None)
    assert {row.mesh for row in done.fitting} >= {"fsdp=2", "fsdp=2, ep=2"}


# -- what is shown


def test_the_page_has_the_picture_all_rows_and_what_was_left_out(eight, tmp_path):
    path = tmp_path / "a'; echo foo.html"
    planned(report=path, name="<script>x</script>", checkpointing="none")
    page = ParsedPage(path.read_text("utf-8"))
    assert "svg" in page.tags and "script" not in page.tags and "<script>x</script> on 8 x" in page.text
    assert "What fits" in page.text and "What does not fit" in page.text
    assert [section.key for section in plan_page(eight).sections] == ["picture", "fits", "left", "notes"]


# -- the command


JOB = ("model=tests.learn.test_planning:net", f"input=[1024,{WIDTH}]", "device=T4", "modes=[ddp]")


def test_the_command_prints_json(answer, tmp_path):
    layouts = (
        "global_batch=32768",
        "checkpointing=[none]",
        "parallel=network_gb_s=50",
        f"report={tmp_path / 'plan.html'}",
    )
    done = answer("plan", *JOB, "gpus=[8,16]", *layouts)
    assert {row["mesh"] for row in done["rows"]} == {"ddp=8", "ddp=16"} and done["global_batch"] == 32768
    best = done["rows"][0]
    assert best["parallel"]["network_gb_s"] == 50 and best["frontier"] and best["fits"] and best["samples_per_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("gpus=8",), "a plan needs model=MODULE:FACTORY and input=[64,3,224,224]"),
        ((*JOB, "gpus=8", "format=xml"), "unknown format 'xml'"),
        ((*JOB, "gpus=1"), "gpus must be a whole number from 2"),
        ((*JOB, "gpus=8", "parallel=ddp=8"), "plan chooses the degrees"),
    ],
)
def test_the_command_refuses_in_one_line(refused, arguments, problem):
    assert problem in refused("plan", *arguments)


def test_settings_of_a_mode_go_to_the_layouts_that_have_it():
    layouts, _ = meshes.meshes_of(8, meshes.layout_settings(8, "param_dtype=bf16,static_graph=true"))
    for one in layouts:
        assert one.fsdp.param_dtype == ("bf16" if one.degrees.fsdp > 1 else None)
        assert one.ddp.static_graph == (one.degrees.ddp > 1 and one.degrees.fsdp == one.degrees.tp == 1)


def test_a_batch_that_does_not_fit_is_halved():
    done = planned(batch=2**20, checkpointing="none")
    fitting = [row.micro_batch for row in done.fitting]
    assert len(fitting) == 1 and max(row.micro_batch for row in done.rows) == 2**20
    beyond = estimate(net, [2 * fitting[0], WIDTH], device=CARD, parallel="ddp=8")
    assert not beyond.fits_device
    assert all(row.micro_batch > fitting[0] and row.why for row in done.rows if row.fits is False)


@pytest.mark.needs_mode("pp")
def test_modes_that_nobody_names_are_tried_beside_shards_alone():
    modes = meshes.modes_of(None, 32_768, lambda: {8})
    layouts, _ = meshes.meshes_of(64, {}, modes)
    unasked = [
        (one.degrees.ddp, one.degrees.fsdp, one.degrees.cp, one.degrees.tp, one.degrees.ep)
        for one in layouts
        if one.degrees.cp > 1 or one.degrees.ep > 1
    ]
    assert sorted(unasked) == sorted([(1, 64 // n, n, 1, 1) for n in (2, 4, 8)] + [(1, 64, 1, 1, n) for n in (2, 4, 8)])
    assert meshes.modes_of(None, length=32_767) == meshes.Modes(("pp", "ddp", "fsdp", "tp"))


@pytest.mark.needs_mode("fsdp")
def test_named_experts_are_divided_over_ranks_that_divide_them():
    layouts, _ = meshes.meshes_of(12, {"gpus_per_node": 12}, meshes.modes_of(["fsdp", "tp", "ep"], 0, lambda: {6}))
    assert {(one.degrees.fsdp, one.degrees.tp, one.degrees.ep) for one in layouts if one.degrees.tp < 3} == {
        (12, 1, 1),
        (12, 1, 2),
        (12, 1, 3),
        (12, 1, 6),
        (6, 2, 1),
        (6, 2, 2),
        (6, 2, 6),
    }
    assert meshes.mesh_text(layouts[-1]).endswith("ep=6")


def row_of(parallel, micro_batch=8, way=None, *, mib=100.0, rate=None, fits=True):
    times = {"step_time_ms": 100.0, "exposed_ms": 20.0, "samples_per_s": rate} if rate else {}
    return PlanRow(
        parallel=parallel,
        micro_batch=micro_batch,
        accumulation=1,
        checkpointing=way,
        fits=fits,
        peak_memory_mib=mib,
        upper_mib=mib,
        **times,
    )


@pytest.fixture
def findings():
    return Findings(limit_mib=1000.0)


def test_what_outgrows_many_shards_is_not_tried_with_fewer(findings):
    findings.add(row_of(Parallel(fsdp=8, tp=2), mib=2000.0, fits=False))
    findings.add(row_of(Parallel(fsdp=8, tp=4), micro_batch=4, mib=1050.0, fits=False))  # near the limit
    fewer, larger = Parallel(ddp=4, fsdp=4), "fsdp=8, tp=2 takes 2,000 MiB already"
    assert findings.outgrown_by(fewer, 8, 1, None) == larger
    assert findings.outgrown_by(fewer, 8, 4, None)
    others = (Parallel(fsdp=16), 8, 1, None), (fewer, 8, 1, "full"), (Parallel(fsdp=8, tp=2), 4, 1, None)
    assert [findings.outgrown_by(*asked) for asked in others] == [None] * 3


def test_checkpointing_that_computes_longer_than_the_best_layout_takes_cannot_win(findings):
    assert not findings.cannot_win(Parallel(ddp=64), "full")
    findings.add(row_of(Parallel(ddp=64), rate=6400.0))
    findings.add(row_of(Parallel(ddp=64), way="full", rate=4800.0))  # 6,000 if no rank waited
    assert findings.cannot_win(Parallel(fsdp=32, tp=2), "full") is True
    assert not findings.cannot_win(Parallel(ddp=8), "full")
    findings.add(row_of(Parallel(ddp=64), way="full", rate=5000.0))
    assert not findings.cannot_win(Parallel(ddp=64), "full")


def test_a_mode_that_made_it_slower_is_not_widened(findings):
    assert findings.not_worth(Parallel(ddp=16, tp=4)) is None
    findings.add(row_of(Parallel(ddp=64), rate=6400.0))
    findings.add(row_of(Parallel(ddp=32, tp=2), rate=6000.0))
    assert findings.not_worth(Parallel(fsdp=16, tp=4)) == "not tried: tp=2 is slower than none of it"
    assert findings.not_worth(Parallel(fsdp=32, tp=2)) is None and findings.not_worth(Parallel(ddp=4, tp=4)) is None
    findings.add(row_of(Parallel(fsdp=32, tp=2), rate=6300.0))  # nearly as quick
    assert findings.not_worth(Parallel(fsdp=16, tp=4)) is None


def test_a_mode_that_fits_where_fewer_ranks_do_not_is_widened(findings):
    findings.add(row_of(Parallel(ddp=64), mib=5000.0, fits=False))
    findings.add(row_of(Parallel(ddp=32, tp=2), rate=6000.0))
    assert findings.not_worth(Parallel(ddp=16, tp=4)) is None
    findings.add(row_of(Parallel(ddp=16, tp=4), rate=5000.0))
    assert findings.not_worth(Parallel(ddp=8, tp=8)) == "not tried: tp=4 is slower than tp=2"
