"""The collection for a lent GPU, on simulated ones: each family in each round, again adds nothing, then a data set."""

import pytest

from conf.errors import UsageError
from featurize.families import family_names
from infra import collect
from tests.warehouse.warehouse_rows import ask
from warehouse.exchange.dataset import find_parts


def settings(tmp_path, **changes):
    return collect.CollectSettings(
        **{
            "families": ["mlp"],
            "n": 2,
            "device": "simulated",
            "data": str(tmp_path / "data"),
            "out": str(tmp_path / "out"),
        }
        | changes
    )


@pytest.mark.slow
def test_whole_cards_shares_of_them_and_pairs_are_measured_and_exported(tmp_path):
    messages = []
    assert collect.collect(settings(tmp_path), messages.append)
    shares = ask(tmp_path / "data", "SELECT memory_fraction, count(*) FROM runs GROUP BY ALL ORDER BY ALL")
    assert shares == [(0.25, 1), (0.5, 1), (None, 3)]
    assert len(find_parts(tmp_path / "out")) == 1 and (tmp_path / "out" / "README.md").exists()
    assert messages[-1] == "all trials are done"
    assert collect.collect(settings(tmp_path), messages.append)
    assert ask(tmp_path / "data", "SELECT count(*) FROM runs") == [(5,)]
    assert "0 runs added, 5 were there already" in messages[-2]


def test_when_the_time_is_up_it_leaves_and_goes_on_later(tmp_path):
    messages = []
    assert not collect.collect(settings(tmp_path, minutes=0), messages.append)
    assert messages == ["nothing has been measured yet; the same command goes on"]


@pytest.mark.spread(3)
@pytest.mark.parametrize("family", family_names())
def test_every_family_has_its_jobs_with_every_training_setting_sampled(tmp_path, family):
    jobs = collect.jobs_of(family, settings(tmp_path))
    assert [job.device.memory_fraction for job in jobs.values()] == [None, 0.5, 0.25, None]
    assert len({job.seed for job in jobs.values()}) == len(jobs)
    varied = {dimension.name for dimension in jobs[1.0].spaces[0].varied}
    assert set(collect.TRAINING) <= varied
    assert len(jobs["pairs"].batch_sizes) > 1


def test_what_no_gpu_measured_does_not_go_into_the_project_s_data_set(tmp_path):
    with pytest.raises(UsageError, match=r"out=\.\.\. is missing"):
        settings(tmp_path, out=None)


def test_kernels_pairs_ranks_and_power_have_submissions_of_their_own(tmp_path):
    def submitted(measured, **changes):
        named = collect.submissions(settings(tmp_path, measure=measured, families=["mlp", "cnn"], **changes))
        return {name: submission for name, [(_, submission)] in named.items()}

    assert submitted("kernels")["cnn"].kernels.steps == 3
    pairs = submitted("pairs")
    assert {name: one.sharing for name, one in pairs.items()} == {"time_slicing": "time_slicing", "mps": "mps"}
    assert pairs["mps"].collocate == "pairs" and pairs["mps"].families == ("mlp", "cnn")
    (layouts,) = [dimension for dimension in submitted("ranks")["mlp"].spaces[0].varied if dimension.name == "parallel"]
    assert [text.split(",")[0] for text in layouts.choices] == ["ddp=2", "fsdp=2", "fsdp=2"]
    power = submitted("power")["mlp"]
    assert power.window.kind == "fixed" and power.batch_sizes == (4, 1024)
    assert list(submitted("pairs", device="cpu")) == ["time_slicing"]
    with pytest.raises(UsageError, match="unknown measure 'runz'; known: kernels, pairs"):
        settings(tmp_path, measure="runz")
