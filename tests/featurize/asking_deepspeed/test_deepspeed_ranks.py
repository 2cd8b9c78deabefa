"""One rank of DeepSpeed's ZeRO in a trace, against real ranks over gloo: bytes and collectives are the same.

What the real ranks did is recorded (`ask_deepspeed.py` asks again), as DeepSpeed is no dependency of the tests.
"""

import json
from pathlib import Path

import pytest
import torch
from deepspeed_nets import CASES, NETS, batch_of
from rank_watch import loss_of
from real_ranks import with_wide

from featurize.job.layout import parse_parallel
from featurize.job.training_settings import Training
from featurize.trace.tracer import trace_step
from tests.featurize.trace_sums import alive, most_of

RECORDED = json.loads((Path(__file__).parent / "deepspeed_runs.json").read_text())
KINDS_OF_STAGE_3 = [name for name in CASES if "stage 3" in name or "overlapping" in name]
SCALARS = 64  # bytes of norms, flags and scales, which are not all in the trace


def traced(case, rank):
    parallel = parse_parallel({"ddp": case["ranks"], "deepspeed": case["config"]}, files=True)
    settings = Training(optimizer="momentum", implementation="foreach", **parallel.zero.deepspeed.training)
    return trace_step(
        lambda: NETS[case["net"]](case["again"]),
        batch_of(case, "meta"),
        torch.empty(0, device="meta"),
        loss=loss_of,
        settings=settings,
        training_loop=False,
        parallel=parallel,
        rank=rank,
    )


@pytest.mark.parametrize(
    "name",
    [
        # "accumulated" has three ranks, too, and "of words again" words in fp32 that are recomputed.
        *with_wide(
            KINDS_OF_STAGE_3,
            ("stage 3", "stage 3 of three", "stage 3 in fp32", "stage 3 again", "stage 3 of words"),
        ),
        *(pytest.param(name, marks=pytest.mark.spread(2)) for name in CASES if name not in KINDS_OF_STAGE_3),
    ],
)
def test_bytes_and_collectives_are_those_of_real_ranks(name):
    for rank, real in enumerate(RECORDED["runs"][name]):
        trace = traced(CASES[name], rank)
        assert most_of(trace, None) == pytest.approx(real["peak"], abs=SCALARS)
        assert alive(trace).total() == pytest.approx(real["end"], abs=SCALARS)
        assert [[one.kind, one.nbytes] for one in trace.collectives if one.nbytes > SCALARS] == real["sent"]
