"""Measures the workspaces of single layers in the allocator, and compares them with those that `featurize` assumes.

Start reading at `measure`; `CASES` are the layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conf.errors import first_line
from workers.probes.children import (
    Measurement,
    ProbeResult,
    Row,
    first_gpu,
    measure_all,
    recorded_entries,
    start_recording,
)

if TYPE_CHECKING:
    import torch
    from torch import nn

    from featurize.device.device_spec import DeviceSpec

# Layer -> its cases, as arguments of the layer and the shape of each input.
CASES: Mapping[str, Sequence[tuple[Mapping[str, Any], tuple[int, ...]]]] = {
    "conv2d": (
        ({"in_channels": 3, "out_channels": 64, "kernel_size": 3, "padding": 1}, (32, 3, 112, 112)),
        ({"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1}, (32, 64, 56, 56)),
        ({"in_channels": 128, "out_channels": 256, "kernel_size": 1}, (32, 128, 28, 28)),
        ({"in_channels": 256, "out_channels": 256, "kernel_size": 3, "padding": 1, "stride": 2}, (16, 256, 28, 28)),
        ({"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1, "groups": 64}, (16, 64, 56, 56)),
        ({"in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 2, "dilation": 2}, (8, 64, 56, 56)),
    ),
    "linear": (
        ({"in_features": 1024, "out_features": 4096}, (512, 1024)),
        ({"in_features": 1024, "out_features": 1000, "bias": False}, (64, 1024)),
    ),
    "attention": (
        ({"is_causal": False}, (8, 8, 256, 64)),  # batch, heads, length, width of queries, keys and values
        ({"is_causal": True}, (4, 8, 1024, 64)),
    ),
    "lstm": (({"input_size": 256, "hidden_size": 512, "num_layers": 2, "batch_first": True}, (32, 128, 256)),),
    "gru": (({"input_size": 256, "hidden_size": 512, "num_layers": 1, "batch_first": True}, (32, 128, 256)),),
}
PRECISIONS = {"fp32": "float32", "tf32": "float32", "fp16-true": "float16", "bf16-true": "bfloat16"}
BENCHMARKED = ("conv2d",)


def measure(folder: Path, device: str, seconds_left: Callable[[], float]) -> ProbeResult:
    """Measure the missing files in FOLDER/workspaces, in a process per layer and way of choosing algorithms."""
    measurements = [
        Measurement(
            name=f"{layer} benchmark" if benchmark else layer,
            function="workers.probes.workspaces:layers",
            arguments={"layer": layer, "benchmark": benchmark},
        )
        for layer in CASES
        for benchmark in ((False, True) if layer in BENCHMARKED else (False,))
    ]
    return measure_all(folder / "workspaces", measurements, device, seconds_left)


def layers(device_uuid: str, layer: str, benchmark: bool) -> Iterator[Row]:
    """Yield a forward and a backward row for each case of a layer in each precision."""
    start_recording()
    import torch

    from featurize.device.device_spec import known_device, load_device
    from featurize.operators.torch_releases import allow_tf32

    name = known_device(torch.cuda.get_device_name(0))
    spec = None if name is None else load_device(name)
    torch.backends.cudnn.benchmark = benchmark
    is_measured, reason = False, ""
    for precision, dtype in PRECISIONS.items():
        allow_tf32(matmul=precision == "tf32", cudnn=True)
        for arguments, shape in CASES[layer]:
            case = {
                "operator": layer,
                "shapes": [list(shape)],
                "dtype": precision,
                "config": {**arguments, "cudnn_benchmark": benchmark},
            }
            torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps a workspace per thread; make each case take a new one
            torch.cuda.empty_cache()
            try:
                measured = _measure(layer, arguments, shape, getattr(torch, dtype))
                assumed = {} if spec is None else assumed_bytes(layer, arguments, shape, precision, spec)
            except RuntimeError as error:  # errors of the device, also out of memory: the other cases continue
                reason = first_line(error)
                yield {**case, "reason": reason}
                continue
            is_measured = True
            for phase, taken in measured.items():
                yield {**case, "phase": phase, **taken, **assumed.get(phase, {})}
    if not is_measured:
        raise RuntimeError(f"no case can be measured: {reason}")


def make_layer(layer: str, arguments: Mapping[str, Any]) -> nn.Module:
    """Return the layer of one of `CASES`, wrapped to return a single tensor."""
    from torch import Tensor, nn
    from torch.nn import functional

    if layer == "conv2d":
        return nn.Conv2d(**arguments)
    if layer == "linear":
        return nn.Linear(**arguments)

    class Attention(nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return functional.scaled_dot_product_attention(query, key, value, **arguments)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = (nn.LSTM if layer == "lstm" else nn.GRU)(**arguments)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layers(x)[0]
            return out

    return Attention() if layer == "attention" else Recurrent()


def _inputs(layer: str) -> int:
    return 3 if layer == "attention" else 1


def _measure(
    layer: str, arguments: Mapping[str, Any], shape: Sequence[int], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    import torch

    device = first_gpu()
    module = make_layer(layer, arguments).to(device, dtype)
    inputs = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(_inputs(layer))]
    wanted = [*inputs, *module.parameters()]
    begin = len(recorded_entries())
    out = module(*inputs)
    torch.cuda.synchronize()
    end = len(recorded_entries())
    gradient = torch.ones_like(out)
    given = len(recorded_entries())
    gradients = torch.autograd.grad(out, wanted, gradient)
    torch.cuda.synchronize()
    entries = recorded_entries()  # while the gradients are alive
    return {
        "forward": requests_beside(entries[begin:end], [out.nbytes]),
        "backward": requests_beside(entries[given:], [tensor.nbytes for tensor in gradients]),
    }


def requests_beside(entries: Sequence[Mapping[str, Any]], results: Sequence[int]) -> dict[str, Any]:
    """Return the memory that a call requests beside its results.

    Args:
        entries: The allocator's history during the call.
        results: Bytes of each result; a request of the same size that is not given back at once counts as it.

    Returns:
        `measured_bytes`, the most memory that was taken and given back during the call. `kept_bytes`, requests that
        outlive the call and are not a result, such as cuBLAS's workspace and saved tensors. `requests`, each as
        [bytes, kept].
    """
    live: dict[int, int] = {}  # address -> number of its request
    requests: list[tuple[int, int, int | None]] = []  # bytes, and the entries that took and gave them back
    for index, entry in enumerate(entries):
        if entry["action"] == "alloc":
            live[entry["addr"]] = len(requests)
            requests.append((entry["size"], index, None))
        elif entry["action"] == "free_completed" and entry["addr"] in live:
            number = live.pop(entry["addr"])
            requests[number] = (*requests[number][:2], index)
    brief = [(size, begin, end) for size, begin, end in requests if end is not None]
    most = max((sum(size for size, begin, end in brief if begin <= now < end) for _, now, _ in brief), default=0)
    kept = Counter(size for size, _, end in requests if end is None) - Counter(results)
    return {
        "measured_bytes": most,
        "kept_bytes": sum(size * count for size, count in kept.items()),
        "requests": [[size, end is None] for size, _, end in requests],
    }


def assumed_bytes(
    layer: str, arguments: Mapping[str, Any], shape: Sequence[int], precision: str, spec: DeviceSpec
) -> dict[str, dict[str, int]]:
    """Return phase -> the largest workspace that the trace assumes of the layer, and what cuBLAS is assumed to keep."""
    import torch
    from torch import Tensor, nn

    from featurize.job.training_settings import Training
    from featurize.operators.library_calls import CUBLAS, workspace_bytes
    from featurize.trace.tracer import trace_step

    class Shifted(nn.Module):
        """The layer behind a parameter, so that its inputs get gradients."""

        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))
            self.layer = make_layer(layer, arguments)

        def forward(self, *inputs: Tensor) -> Tensor:
            out: Tensor = self.layer(*(x + self.shift for x in inputs))
            return out

    trace = trace_step(
        Shifted,
        lambda device: (tuple(torch.empty(shape, device=device) for _ in range(_inputs(layer))), None),
        loss=lambda out, target: out.sum(),
        settings=Training(optimizer="sgd", precision=precision),
        device=spec,
        training_loop=False,
    )
    assumed = {phase: {"assumed_bytes": 0, "assumed_kept_bytes": 0} for phase in ("forward", "backward")}
    for event in trace.events:
        call = trace.blocks[event.block].call
        if call is not None and event.nbytes == 0 and event.phase in assumed:
            column = "assumed_kept_bytes" if call.kind == CUBLAS else "assumed_bytes"
            figures = assumed[event.phase]
            figures[column] = max(figures[column], workspace_bytes(call, spec))
    return assumed
