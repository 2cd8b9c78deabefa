"""Bytes of a trace, by the kind of the tensors that hold them. Start reading at `alive_after`."""

from collections import Counter

from featurize.recording.step_trace import StepTrace


def bytes_of(trace: StepTrace, kind: str) -> int:
    """Bytes of all tensors of the kind that the traced steps make."""
    return sum(block.nbytes for block in trace.blocks if block.kind == kind)


def alive(trace: StepTrace, events: int | None = None) -> Counter[str]:
    """Bytes by kind after so many events, or after all of them."""
    live: Counter[str] = Counter()
    for event in trace.events[:events]:
        live[trace.blocks[event.block].kind] += event.nbytes
    return live


def alive_after(trace: StepTrace, step: int, *phases: str) -> Counter[str]:
    """Bytes by kind when the last of these phases of a step has ended."""
    last = max(i for i, event in enumerate(trace.events) if event.step == step and event.phase in phases)
    return alive(trace, last + 1)


def most_of(trace: StepTrace, kind: str | None, phases: tuple[str, ...] = ("forward", "backward", "optimizer")) -> int:
    """The most bytes of a kind, or of all, that are alive at once in these phases of the second step."""
    live = most = 0
    for event in trace.events:
        if kind in (None, trace.blocks[event.block].kind):
            live += event.nbytes
            if event.step == 2 and event.phase in phases:
                most = max(most, live)
    return most
