"""The names that a growth cycle gives its runs, and the words of its plan."""

from farm.nights.journal import ChoicePayload
from farm.nights.plan import choice_lines

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


def test_a_plan_of_simulated_runs_speaks_of_no_measurement_and_no_gpu_hours():
    text = "\n".join(choice_lines(CHOICE, "simulated"))
    assert "3 simulated already" in text and "0.25 hours of simulated runs" in text
    assert "measured" not in text and "GPU" not in text


def test_a_plan_of_measured_runs_speaks_of_gpu_hours():
    text = "\n".join(choice_lines(CHOICE, "measured"))
    assert "3 measured already" in text and "0.25 GPU-hours" in text
