"""Convolutions to learn from and to judge by, and cuDNN's answers about them on every GPU model.

Start reading at `answered`. The convolutions to learn from are those of the runs of the family `cudnn`, neighbours
of theirs, and plain ones; those to judge by are of networks, which nothing is fitted on.
"""

from __future__ import annotations

import contextlib
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import warehouse
from conf.errors import EnvironmentProblem, UsageError
from featurize.cudnn.answer_cache import AnswerCache
from featurize.cudnn.libraries import installed_libraries
from featurize.cudnn.oracle import CRASHED, HUNG, NOT_ASKED, CudnnOracle
from featurize.cudnn.recorded import read_answers
from featurize.cudnn.signature import OPERATIONS, ConvolutionSignature, OracleAnswer, SearchSettings
from featurize.device_spec import DeviceSpec
from warehouse.folder import DataFolder

FAMILY = "cudnn"
LEAST_CONVOLUTIONS = 20  # of runs, to fit anything
_LARGEST_ELEMENTS = 2**29  # of a neighbour's tensors
_MOST_CHANNELS = 4096
_BATCHES = (1, 8, 32, 128)  # at which networks are judged
_AT_ONCE = 200  # queries of one call, which gives up after a few crashes of the library
_SIDES = (7, 8, 10, 14, 16, 20, 28, 32, 40, 56, 64, 80, 112, 128, 160, 224, 256, 384)  # of plain images
_ANSWERED_TYPES = ("float32", "float16", "bfloat16")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class LabelledWorkspaces:
    """n answers of cuDNN: the convolution, whether TF32 was allowed, multiprocessors of the GPU model, and the bytes of
    PyTorch's first choice, NaN where cuDNN has no engine."""

    signatures: tuple[ConvolutionSignature, ...]
    allow_tf32: np.ndarray
    sm_count: np.ndarray
    nbytes: np.ndarray

    def where(self, chosen: np.ndarray) -> LabelledWorkspaces:
        """Return the rows of a mask (n,)."""
        kept = tuple(s for s, wanted in zip(self.signatures, chosen, strict=True) if wanted)
        return LabelledWorkspaces(kept, self.allow_tf32[chosen], self.sm_count[chosen], self.nbytes[chosen])

    def of_operation(self, operation: str) -> LabelledWorkspaces:
        """Return the rows of one operation."""
        return self.where(np.array([signature.operation == operation for signature in self.signatures], dtype=bool))


def joined(parts: Sequence[LabelledWorkspaces]) -> LabelledWorkspaces:
    """Return the rows of all parts."""
    return LabelledWorkspaces(
        tuple(signature for part in parts for signature in part.signatures),
        *(np.concatenate([getattr(part, name) for part in parts]) for name in ("allow_tf32", "sm_count", "nbytes")),
    )


def convolutions_of_runs(folder: DataFolder) -> list[ConvolutionSignature]:
    """Return the distinct convolutions that runs of the family asked cuDNN about, as forward operations.

    Raises:
        UsageError: The folder holds too few.
    """
    with contextlib.closing(warehouse.connect(folder.open())) as connection:
        rows = connection.execute(
            "SELECT convolutions FROM runs WHERE family = ? AND convolutions IS NOT NULL ORDER BY run_id", [FAMILY]
        ).fetchall()
    distinct: dict[ConvolutionSignature, None] = {}
    for (text,) in rows:
        try:
            answers = read_answers(json.loads(text)).answers
        except ValueError:
            continue
        distinct |= dict.fromkeys(signature._replace(operation=OPERATIONS[0]) for signature in answers)
    if len(distinct) < LEAST_CONVOLUTIONS:
        raise UsageError(
            f"data={folder.root} holds {len(distinct)} convolutions that cuDNN was asked about; "
            "first run: python -m farm.submit +arch=cudnn n=2000 device=simulated"
        )
    return list(distinct)


def neighbours(
    convolutions: Iterable[ConvolutionSignature], variants: int, seed: int
) -> Iterator[ConvolutionSignature]:
    """Yield each convolution and `variants` others like it, with other batches, types, layouts, widths and sizes."""
    draw = random.Random(seed)
    for convolution in convolutions:
        yield convolution
        for _ in range(variants):
            if (other := _neighbour(convolution, draw)) is not None:
                yield other


def _neighbour(convolution: ConvolutionSignature, draw: random.Random) -> ConvolutionSignature | None:
    """Return another convolution of the same kernel; None where the drawn one is too large or has no output."""
    groups, spatial = convolution.groups, len(convolution.image) - 2
    dtype, channels_last = convolution.dtype, convolution.channels_last
    if not convolution.depthwise:  # PyTorch asks cuDNN about depthwise ones in some layouts and types only
        dtype = _drawn_type(draw)
        flat = spatial == 2 and convolution.image[2] == 1 and convolution.kernel[2] == 1
        channels_last = not flat and draw.random() < 0.35
        width_in, width_out = convolution.kernel[1], convolution.kernel[0] // groups
        width_in, width_out = (_scaled(width, draw, _MOST_CHANNELS // groups) for width in (width_in, width_out))
    else:
        groups = _scaled(groups, draw, _MOST_CHANNELS)
        width_in, width_out = 1, convolution.kernel[0] // convolution.groups
    zoom = draw.choice((0.5, 1, 1, 2))
    sides = tuple(side if side == 1 else max(1, round(side * zoom)) for side in convolution.image[2:])
    geometry = zip(
        sides, convolution.kernel[2:], convolution.stride, convolution.padding, convolution.dilation, strict=True
    )
    after = tuple(
        (side + 2 * pad - dilation * (size - 1) - 1) // step + 1 for side, size, step, pad, dilation in geometry
    )
    if min(after) < 1:
        return None
    of_sample = max(groups * width_in * math.prod(sides), groups * width_out * math.prod(after))
    batch = min(round(math.exp(draw.uniform(0, math.log(512)))), _LARGEST_ELEMENTS // of_sample)
    if batch < 1:
        return None
    return convolution._replace(
        image=(batch, groups * width_in, *sides),
        kernel=(groups * width_out, width_in, *convolution.kernel[2:]),
        response=(batch, groups * width_out, *after),
        dtype=dtype,
        channels_last=channels_last,
    )


def plain_convolutions(count: int, seed: int) -> Iterator[ConvolutionSignature]:
    """Yield the layers that most networks are made of: images, small kernels, one group, widths of whole tiles."""
    draw = random.Random(seed)
    for _ in range(count):
        size, step, side = draw.choice((1, 1, 1, 3, 3, 3, 5, 7)), draw.choice((1, 1, 1, 2)), draw.choice(_SIDES)
        width_in = _whole_width(draw) if draw.random() < 0.95 else 3
        width_out = draw.choice(
            (width_in, 4 * width_in, max(8, width_in // 4), *(_whole_width(draw) for _ in range(3)))
        )
        after = _side_after(side, step)
        of_sample = max(width_in * side**2, width_out * after**2)
        power = draw.uniform(0, 9)
        batch = min(round(2 ** (power if draw.random() < 0.5 else int(power))), _LARGEST_ELEMENTS // of_sample)
        if batch >= 1 and width_out <= _MOST_CHANNELS:
            image, kernel = (batch, width_in, side, side), (width_out, width_in, size, size)
            yield _padded(image, kernel, step, _drawn_type(draw), channels_last=draw.random() < 0.35)


def depthwise_convolutions(count: int, seed: int) -> Iterator[ConvolutionSignature]:
    """Yield depthwise layers in channels-last layout, where they are cuDNN's."""
    draw = random.Random(seed)
    for _ in range(count):
        size, step, side = draw.choice((3, 3, 5, 7)), draw.choice((1, 1, 2)), draw.choice(_SIDES)
        width = _whole_width(draw)
        batch = min(round(2 ** draw.uniform(0, 9)), _LARGEST_ELEMENTS // (width * side**2))
        if batch >= 1:
            yield _padded(
                (batch, width, side, side), (width, 1, size, size), step, _drawn_type(draw), channels_last=True
            )


def _padded(
    image: tuple[int, int, int, int], kernel: tuple[int, int, int, int], step: int, dtype: str, *, channels_last: bool
) -> ConvolutionSignature:
    """Return the forward operation of an odd square kernel, padded by half of it."""
    after, pad = _side_after(image[2], step), kernel[2] // 2
    return ConvolutionSignature(
        operation=OPERATIONS[0],
        image=image,
        kernel=kernel,
        response=(image[0], kernel[0], after, after),
        stride=(step, step),
        padding=(pad, pad),
        dilation=(1, 1),
        dtype=dtype,
        channels_last=channels_last,
    )


def _side_after(side: int, step: int) -> int:
    return (side - 1) // step + 1


def _drawn_type(draw: random.Random) -> str:
    return draw.choice((_ANSWERED_TYPES[0], *_ANSWERED_TYPES))


def _whole_width(draw: random.Random) -> int:
    tile = draw.choice((8, 16, 32, 64))
    return max(tile, round(math.exp(draw.uniform(math.log(16), math.log(2048))) / tile) * tile)


def _scaled(width: int, draw: random.Random, most: int) -> int:
    return min(max(1, round(width * draw.choice((0.25, 0.5, 1, 1, 2, 4)))), max(1, most))


def convolutions_of_networks(names: Sequence[str]) -> list[ConvolutionSignature]:
    """Return the distinct convolutions of timm's models at several batches, in fp32 and fp16 and in both layouts.

    Raises:
        UsageError: timm is not installed, or has no such model.
    """
    from featurize.trace import trace_config
    from featurize.trial import config_from_mapping

    distinct: dict[ConvolutionSignature, None] = {}
    for name in names:
        for channels_last in (False, True):
            config = config_from_mapping(
                {"family": "timm", "model": name, "batch_size": 2, "channels_last": channels_last}
            )
            for convolution in trace_config(config).cudnn_convolutions:
                distinct |= dict.fromkeys(_at_batches(convolution))
    return list(distinct)


def _at_batches(convolution: ConvolutionSignature) -> Iterator[ConvolutionSignature]:
    for batch in _BATCHES:
        for dtype in ("float32",) if convolution.depthwise else ("float32", "float16"):
            yield convolution._replace(
                image=(batch, *convolution.image[1:]), response=(batch, *convolution.response[1:]), dtype=dtype
            )


def answered(
    convolutions: Sequence[ConvolutionSignature],
    devices: Sequence[DeviceSpec],
    workers: int,
    progress: Progress,
    kept: Path | None = None,
) -> dict[str, LabelledWorkspaces]:
    """Ask cuDNN about every convolution on every GPU model, in fp32 with and without TF32.

    Args:
        convolutions: What is asked, as it is: of one operation each.
        devices: The GPU models.
        workers: Processes of cuDNN at a time.
        progress: Called with what is under way, and how far it is.
        kept: File that keeps the answers; None keeps none.

    Returns:
        The answers by the GPU model's name.

    Raises:
        EnvironmentProblem: cuDNN is not installed, or its process does not start.
    """
    libraries = installed_libraries()
    exact = [convolution for convolution in convolutions if convolution.dtype == "float32"]
    chunks = [
        (device, search, tuple(asked[start : start + _AT_ONCE]))
        for device in devices
        for search, asked in ((SearchSettings(), convolutions), (SearchSettings(allow_tf32=False), exact))
        for start in range(0, len(asked), _AT_ONCE)
    ]
    shares = [chunks[place::workers] for place in range(workers)]
    done = 0

    def ask(share: list[tuple[DeviceSpec, SearchSettings, tuple[ConvolutionSignature, ...]]]) -> list[_Answers]:
        nonlocal done
        oracle: CudnnOracle | None = None
        of_device, answers = None, []
        try:
            for device, search, asked in share:
                if oracle is None or device is not of_device:
                    if oracle is not None:
                        oracle.close()
                    oracle, of_device = CudnnOracle(libraries, device, AnswerCache(kept) if kept else None), device
                answers.append((device, search, oracle.answers(asked, search)))
                done += 1
                progress("asking cuDNN", done, len(chunks))
        finally:
            if oracle is not None:
                oracle.close()
        return answers

    with ThreadPoolExecutor(workers) as pool:  # the work is done by cuDNN's processes
        parts = [part for share in pool.map(ask, shares) for part in share]
    return {device.name: joined([_labelled(*part) for part in parts if part[0] is device]) for device in devices}


_Answers = tuple[DeviceSpec, SearchSettings, dict[ConvolutionSignature, OracleAnswer]]


def _labelled(
    device: DeviceSpec, search: SearchSettings, answers: dict[ConvolutionSignature, OracleAnswer]
) -> LabelledWorkspaces:
    complete = {signature: one for signature, one in answers.items() if one.problem not in (HUNG, CRASHED, NOT_ASKED)}
    sizes = [answer.plans[0].workspace_bytes if answer.plans else math.nan for answer in complete.values()]
    return LabelledWorkspaces(
        tuple(complete),
        np.full(len(sizes), search.allow_tf32),
        np.full(len(sizes), device.sm_count),
        np.array(sizes, dtype=np.float64),
    )


def every_operation(convolutions: Iterable[ConvolutionSignature]) -> list[ConvolutionSignature]:
    """Return the forward operation and both gradients of each convolution, each once."""
    distinct = dict.fromkeys(convolutions)
    return [convolution._replace(operation=operation) for convolution in distinct for operation in OPERATIONS]


def require_cudnn() -> str:
    """Return the version of the installed cuDNN. Raises `EnvironmentProblem` that names the extra."""
    try:
        return installed_libraries().version
    except EnvironmentProblem as problem:
        raise EnvironmentProblem(f"only cuDNN's own answers can be distilled: {problem}") from problem
