"""Workspaces of a traced step's convolutions on one GPU model: from cuDNN, or guessed, with scenarios for the guesses.

Start reading at `convolution_workspaces`; `for_release` turns its answers into those of a PyTorch release's own cuDNN.
Without a GPU, and without asking cuDNN, workspaces of convolutions are not known. `reserved_by_scenario` returns the
peak under several assumptions, which a learner weights by measurements.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

import torch

from featurize.cudnn.oracle import OLDEST, CudnnOracle, cudnn_of, version_text
from featurize.cudnn.signature import ConvolutionSignature, OracleAnswer, SearchSettings
from featurize.device.device_spec import DeviceSpec
from featurize.memory.allocator import SMALL_REQUEST, CachingAllocator
from featurize.operators.library_calls import CUBLAS, ConvolutionWorkspace, LibraryCall, workspace_bytes
from featurize.operators.torch_releases import cudnn_allows_tf32
from featurize.recording.step_trace import StepTrace

ORACLE, GUESSED = "oracle", "guessed"

_NOT_AS_ASKED = "cuDNN {} takes none for 1x1 kernels in fp32"


def search_settings(*, benchmark: bool) -> SearchSettings:
    """Return PyTorch's search settings in this process: `torch.backends.cudnn` and the environment."""
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
    """Return the workspace of each convolution of a trace, from one batch of questions.

    Raises:
        EnvironmentProblem: cuDNN's process does not start.
    """
    answers = oracle.answers(trace.cudnn_convolutions, search)
    return {call: _workspace(call, spec, answers, oracle.version) for call in trace.convolution_calls}


def guessed_workspace(call: LibraryCall, spec: DeviceSpec, problem: str = "") -> ConvolutionWorkspace:
    """Return the guess, with the reason why cuDNN did not answer, if it was asked."""
    return ConvolutionWorkspace(source=GUESSED, sizes=(workspace_bytes(call, spec),), problem=problem)


def workspaces_note(workspaces: Mapping[LibraryCall, ConvolutionWorkspace]) -> str:
    """Return one line with the sources of the workspaces, and their numbers of distinct convolutions."""
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


def traced_release_note(torch_version: str) -> str:
    """Return a note on the parts of an estimate that do not follow the requested release."""
    return (
        f"torch_version={torch_version}: only cuDNN's workspaces follow it (workspaces=cudnn or auto); "
        f"the step is traced with PyTorch {torch.__version__.partition('+')[0]}, which is installed"
    )


def for_release(
    workspaces: Mapping[LibraryCall, ConvolutionWorkspace],
    spec: DeviceSpec,
    *,
    torch_version: str | None = None,
    benchmark: bool = False,
) -> dict[LibraryCall, ConvolutionWorkspace]:
    """Return the workspaces that the cuDNN of a release of PyTorch takes.

    cuDNN before 9.8 cannot be asked. Jobs that ran with 9.1 (fp32, A100) left no room for the workspaces that later
    versions take for 1x1 kernels: channels-last copies of input and output. Those stay guessed for such a release.

    Args:
        workspaces: The answers of a newer cuDNN.
        spec: The GPU model.
        torch_version: The release of PyTorch that runs the job; None: the installed one.
        benchmark: `cudnn.benchmark`: all engines are tried, so the answers stay unchanged.
    """
    release = cudnn_of(torch_version or torch.__version__)
    if release is None or release >= OLDEST or benchmark:
        return dict(workspaces)
    problem = _NOT_AS_ASKED.format(version_text(release))
    return {
        call: guessed_workspace(call, spec, problem) if _copied_later_only(call, workspace) else workspace
        for call, workspace in workspaces.items()
    }


def release_note(
    workspaces: Mapping[LibraryCall, ConvolutionWorkspace], *, torch_version: str | None = None
) -> str | None:
    """Return a note where the cuDNN that answered is not the release's; None where it is, or where it is not known."""
    torch_version = torch_version or torch.__version__
    release = cudnn_of(torch_version)
    if release is None:
        return None
    brings = f"workspaces: PyTorch {torch_version.partition('+')[0]} comes with cuDNN {version_text(release)}"
    note = brings
    answered = sorted({workspace.cudnn for workspace in workspaces.values()} - {""})
    if any(version.split(".")[:2] != [*map(str, release[:2])] for version in answered):
        note += f", and {' and '.join(answered)} was asked: two versions can choose different engines"
    guessed = sum(workspace.problem == _NOT_AS_ASKED.format(version_text(release)) for workspace in workspaces.values())
    if guessed:
        note += f"; {guessed} convolutions with 1x1 kernels stay guessed"
    return None if note == brings else note


def _copied_later_only(call: LibraryCall, workspace: ConvolutionWorkspace) -> bool:
    signature = call.convolution
    return (
        signature is not None
        and workspace.source != GUESSED
        and signature.dtype == "float32"
        and not signature.channels_last
        and signature.pointwise
    )


# Scenario -> operation, and whether the kernel is pointwise (of one element) -> copies of image, kernel and response in
# the workspace; none for operations that are not listed. Engines for the tensor cores work on copies in channels-last
# layout; `copies` has those that cuDNN 9.8 takes most often on compute capability 8.0.
_ALL = (1, 1, 1)
SCENARIOS: Mapping[str, Mapping[tuple[str, bool], tuple[int, int, int]]] = {
    "none": {},
    "forward": {("forward", False): _ALL},
    "data_gradient": {("data_gradient", False): _ALL},
    "weight_gradient": {("weight_gradient", False): _ALL},
    "pointwise": {("weight_gradient", True): _ALL},
    "copies": {
        ("forward", False): (1, 1, 0),
        ("forward", True): (1, 1, 0),
        ("data_gradient", False): _ALL,
        ("weight_gradient", False): _ALL,
        ("weight_gradient", True): _ALL,
    },
}
_FEW_CHANNELS = 4  # channels of the image up to which cuDNN has forward kernels without copies
SETTLED = "settled"
_MOST_STEPS = 8  # more than the replay's: of 2,039 networks, none reserved more after five


def reserved_by_scenario(trace: StepTrace, spec: DeviceSpec) -> dict[str, int]:
    """Return scenario -> the peak of reserved bytes. The GPU model's capacity is ignored.

    `settled` uses the guessed workspaces, as the replay does, and repeats the last step until reserved memory is
    constant. The others take copies of image, kernel and response for some convolutions, over the replay's own steps.
    """
    guessed = trace.guessed_sizes(spec)
    return trace.remembered(("scenarios", *guessed.values()), lambda: _reserved_by_scenario(trace, guessed))


def _reserved_by_scenario(trace: StepTrace, sizes_of: Mapping[LibraryCall, int]) -> dict[str, int]:
    calls, guessed = list(sizes_of), list(sizes_of.values())
    pools = trace.remembered("events", lambda: _by_pool(trace, calls))
    steps = zip(*(pool.reserved(guessed) for pool in pools), strict=False)
    settled = next(steps)
    for repeated in itertools.islice(steps, _MOST_STEPS):  # none where a pool's last step cannot follow itself
        if repeated == settled:
            break
        settled = repeated
    reserved = {SETTLED: sum(settled)}
    for name, copies in SCENARIOS.items():
        sizes = [
            _spare_workspace(call, copies) if call.spare else guess for call, guess in zip(calls, guessed, strict=True)
        ]
        reserved[name] = sum(next(pool.reserved(sizes)) for pool in pools)
    return reserved


def _spare_workspace(call: LibraryCall, copies: Mapping[tuple[str, bool], tuple[int, int, int]]) -> int:
    signature = call.convolution
    if signature is None or (signature.operation == "forward" and signature.image[1] <= _FEW_CHANNELS):
        return 0
    shapes = signature.image, signature.kernel, signature.response
    numbers = copies.get((signature.operation, signature.pointwise), (0, 0, 0))
    return call.element_bytes * sum(n * math.prod(shape) for n, shape in zip(numbers, shapes, strict=True))


def _by_pool(trace: StepTrace, calls: Sequence[LibraryCall]) -> tuple[_Pool, _Pool]:
    """Return the events of the allocator's small and large pool, which share no memory. `calls` are the distinct
    ones."""
    numbers = {call: number for number, call in enumerate(calls)}
    pools = _Pool(calls, small=True), _Pool(calls, small=False)
    last = trace.events[-1].step if trace.events else 0
    for block, nbytes, step, _phase in trace.events:
        if nbytes:
            pools[abs(nbytes) > SMALL_REQUEST].events[step == last].append((block, nbytes))
        elif (call := trace.blocks[block].call) is not None:  # the scenario decides its size
            for pool in pools:
                pool.events[step == last].append((~numbers[call], 0))
    return pools


class _Pool:
    """The events of one of the allocator's pools, split before the trace's last step, which can be repeated.

    Args:
        calls: The distinct library calls, whose workspaces may lie in either pool.
        small: Whether it is the pool of requests of up to `SMALL_REQUEST` bytes, or of larger ones.
    """

    def __init__(self, calls: Sequence[LibraryCall], *, small: bool) -> None:
        self._calls, self._small = calls, small
        # Before the last step and in it: block and bytes; for a workspace, ~ its call's index and 0.
        self.events: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
        # By the sizes of its workspaces. Threads replace what they add to: two may play one pool.
        self._reserved: dict[tuple[int, ...], tuple[int, ...]] = {}

    @cached_property
    def successors(self) -> dict[int, int] | None:
        """Block that the last step inherits and frees -> the equally large block that it leaves to the next step; None
        unless it leaves as many blocks of each size as it inherits: only then it can follow itself."""
        first, last = self.events
        sizes = {block: nbytes for block, nbytes in (*first, *last) if nbytes > 0}
        allocated = [block for block, nbytes in last if nbytes > 0]
        freed = {block for block, nbytes in last if nbytes < 0}
        remaining: dict[int, list[int]] = defaultdict(list)
        for block in reversed(allocated):
            if block not in freed:
                remaining[sizes[block]].append(block)
        pairs = {}
        for block in sorted(freed.difference(allocated)):
            if not remaining[sizes[block]]:
                return None
            pairs[block] = remaining[sizes[block]].pop()
        return None if any(remaining.values()) else pairs

    def reserved(self, sizes: Sequence[int]) -> Iterator[int]:
        """Yield the reserved bytes after all steps, then after each repetition of the last one. Known ones are not
        played again: GPU models, and scenarios, differ in few workspaces.

        Ends after all steps where the last one cannot follow itself.

        Args:
            sizes: Workspace sizes of the calls; those in the other pool are ignored.
        """
        own_sizes = tuple(size if (size <= SMALL_REQUEST) == self._small else 0 for size in sizes)
        known = self._reserved.get(own_sizes, ())
        yield from known
        if not known or self.successors is not None:
            for nbytes in itertools.islice(self._play(own_sizes), len(known), None):
                known = self._reserved[own_sizes] = (*known, nbytes)
                yield nbytes

    def _play(self, own_sizes: tuple[int, ...]) -> Iterator[int]:
        allocator = CachingAllocator()
        allocate, free, touch = allocator.allocate, allocator.free, allocator.touch
        handles: dict[int, int | None] = {}
        events = [*self.events[0], *self.events[1]]
        while True:
            for block, nbytes in events:
                if nbytes > 0:
                    handles[block] = allocate(nbytes)
                elif nbytes < 0:
                    free(handles.pop(block))
                elif nbytes_taken := own_sizes[~block]:
                    if self._calls[~block].kind == CUBLAS:  # cuBLAS keeps its workspace
                        allocate(nbytes_taken)
                    else:
                        touch(nbytes_taken)
            yield allocator.reserved_bytes
            if self.successors is None:
                return
            for inherited, successor in self.successors.items():
                handles[inherited] = handles.pop(successor)
            events = self.events[1]
