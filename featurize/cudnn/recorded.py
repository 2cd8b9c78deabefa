"""cuDNN's answers about a step's convolutions, as a run records them (column `convolutions` of `runs`).

Start reading at `answers_to_record`; `read_answers` is its reverse. Torch-free.

    {"cudnn": "9.28.0", "search": {"heuristics": "A", "allow_tf32": true, ...},
     "convolutions": [{"signature": [...], "layout": "nchw", "engine": "eng38_k2=4", "workspace_bytes": 25837584}, ...]
    }

Engine and workspace are of PyTorch's first choice; a convolution without a plan has `problem` in their place. With
`cudnn_benchmark`, a further key, `tried_bytes`, lists the workspaces of all plans that PyTorch would measure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.errors import CommandError
from featurize.cudnn.signature import (
    ConvolutionSignature,
    EnginePlan,
    OracleAnswer,
    SearchSettings,
    answer_of,
    require_signature,
    signature_of,
)

if TYPE_CHECKING:
    from featurize.cudnn.oracle import CudnnOracle
    from featurize.step_trace import StepTrace


class RecordedAnswers(NamedTuple):
    """What a run recorded: the version of cuDNN, how it was asked, and the answer about each convolution."""

    cudnn: str
    search: SearchSettings
    answers: dict[ConvolutionSignature, OracleAnswer]


def answers_to_record(trace: StepTrace, oracle: CudnnOracle, search: SearchSettings) -> dict[str, Any]:
    """Return what a run records of a traced step.

    Raises:
        EnvironmentProblem: cuDNN's process does not start.
    """
    answers = oracle.answers(trace.cudnn_convolutions, search)
    return {
        "cudnn": oracle.version,
        "search": dict(vars(search)),
        "convolutions": [_entry(signature, answers[signature]) for signature in trace.cudnn_convolutions],
    }


def _entry(signature: ConvolutionSignature, answer: OracleAnswer) -> dict[str, Any]:
    entry: dict[str, Any] = {"signature": signature, "layout": signature.layout}
    if not answer.plans:
        return {**entry, "problem": answer.problem}
    first = answer.plans[0]
    entry |= {"engine": first.engine, "workspace_bytes": first.workspace_bytes}
    return entry if len(answer.plans) == 1 else {**entry, "tried_bytes": [p.workspace_bytes for p in answer.plans]}


def read_answers(content: Any) -> RecordedAnswers:
    """Return the answers from a run's parsed column, which anybody may have written. Raises `ValueError` for others."""
    try:
        search = SearchSettings(**content["search"])
        answers = dict(map(_answer, content["convolutions"]))
        version = content["cudnn"]
    except (CommandError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"no answers of cuDNN: {error}") from error
    if not isinstance(version, str):
        raise ValueError("no answers of cuDNN: its version is no text")
    return RecordedAnswers(version, search, answers)


def _answer(entry: Mapping[str, Any]) -> tuple[ConvolutionSignature, OracleAnswer]:
    signature = require_signature(signature_of(entry["signature"]))
    if "problem" in entry:
        return signature, answer_of({"plans": [], "problem": entry["problem"]})
    first = EnginePlan(entry["engine"], entry["workspace_bytes"])
    others = [EnginePlan("", nbytes) for nbytes in entry.get("tried_bytes", ())[1:]]
    return signature, answer_of({"plans": [first, *others], "problem": ""})
