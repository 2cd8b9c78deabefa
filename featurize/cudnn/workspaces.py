"""What a traced step's convolutions take while they run, on one GPU model, and how that is known.

Start reading at `convolution_workspaces`.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from featurize.cudnn.oracle import CudnnOracle
from featurize.cudnn.signature import ConvolutionSignature, OracleAnswer, SearchSettings
from featurize.device_spec import DeviceSpec
from featurize.library_calls import LibraryCall, workspace_bytes
from featurize.step_trace import StepTrace
from featurize.tf32 import cudnn_allows_tf32

ORACLE, GUESSED = "oracle", "guessed"


@dataclass(frozen=True, kw_only=True)
class ConvolutionWorkspace:
    """The workspace of one convolution.

    source     `oracle`: cuDNN answered; `guessed`: copies of input, weight and output (`featurize.library_calls`)
    sizes      bytes that PyTorch tries to take, the largest first
    engine     cuDNN's name of the configuration that the heuristics name first; empty where cuDNN was not asked
    layout     in which cuDNN is given the tensors: nchw, nhwc, ...; empty where it is guessed
    cudnn      version of cuDNN; empty where it is guessed
    problem    why cuDNN did not answer, where it was asked
    """

    source: str
    sizes: tuple[int, ...]
    engine: str = ""
    layout: str = ""
    cudnn: str = ""
    problem: str = ""


def search_settings(*, benchmark: bool) -> SearchSettings:
    """Return how PyTorch searches, as this process has set it: `torch.backends.cudnn` and the environment."""
    mode_b = os.environ.get("TORCH_CUDNN_USE_HEURISTIC_MODE_B") == "1"
    return SearchSettings(
        heuristics="B" if mode_b else "A",
        allow_tf32=cudnn_allows_tf32(),
        deterministic=torch.backends.cudnn.deterministic or torch.are_deterministic_algorithms_enabled(),
        benchmark=benchmark,
    )


def convolution_workspaces(
    trace: StepTrace, spec: DeviceSpec, oracle: CudnnOracle, search: SearchSettings
) -> dict[LibraryCall, ConvolutionWorkspace]:
    """Return the workspace of each convolution of a trace; all of them are asked about at once.

    Raises:
        EnvironmentProblem: cuDNN's process does not start.
    """
    answers = oracle.answers(trace.cudnn_convolutions, search)
    return {call: _workspace(call, spec, answers, oracle.version) for call in trace.convolution_calls}


def guessed_workspace(call: LibraryCall, spec: DeviceSpec, problem: str = "") -> ConvolutionWorkspace:
    """Return the guess, and why cuDNN did not answer, where it was asked."""
    return ConvolutionWorkspace(source=GUESSED, sizes=(workspace_bytes(call, spec),), problem=problem)


def workspaces_note(workspaces: Mapping[LibraryCall, ConvolutionWorkspace]) -> str:
    """Return one line that says who answered for how many distinct convolutions."""
    if not workspaces:
        return "workspaces: the step has no convolution"
    by_source = Counter(workspace.source for workspace in workspaces.values())
    versions = sorted({workspace.cudnn for workspace in workspaces.values()} - {""})
    named = {
        ORACLE: f"cuDNN {' and '.join(versions)} for {by_source[ORACLE]}",
        GUESSED: f"guessed for {by_source[GUESSED]}",
    }
    counted = ", ".join(text for source, text in named.items() if by_source[source])
    return f"workspaces of {len(workspaces)} distinct convolutions: {counted}"


def _workspace(
    call: LibraryCall, spec: DeviceSpec, answers: Mapping[ConvolutionSignature, OracleAnswer], version: str
) -> ConvolutionWorkspace:
    signature = call.convolution
    answer = answers[signature] if signature is not None else None
    if signature is None or answer is None or not answer.plans:
        return guessed_workspace(call, spec, answer.problem if answer is not None else "")
    sizes = sorted({plan.workspace_bytes for plan in answer.plans}, reverse=True)
    return ConvolutionWorkspace(
        source=ORACLE,
        sizes=tuple(sizes),
        engine=answer.plans[0].engine,
        layout=signature.layout,
        cudnn=version,
    )
