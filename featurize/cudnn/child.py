"""The process that loads cuDNN: it answers one query at a time, and may crash or hang without harm to anyone else.

Start reading at `main`. `featurize.cudnn.oracle` starts it by its file, and reads a line of JSON for each line that it
writes. Imports no torch.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from featurize.cudnn.driver_stand_in import SONAME, write_driver_stand_in
from featurize.cudnn.signature import (
    ConvolutionSignature,
    EnginePlan,
    OracleAnswer,
    SearchSettings,
    signature_of,
)

# torch.backends.cudnn.benchmark_limit: how many plans PyTorch measures by default.
BENCHMARK_LIMIT = 10
NO_ENGINE = "cuDNN has no engine for it"


def main() -> None:
    """Answer queries from standard input until it ends."""
    # The libraries may print: the answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    opening = json.loads(sys.stdin.readline())
    try:
        ask, version = _opened(opening["libraries"], opening["device"])
    except Exception as error:  # whatever the libraries raise, the parent says that there is no oracle, and why
        _write(answers, {"problem": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {"version": version})
    for line in sys.stdin:
        query = json.loads(line)
        signature = signature_of(query["signature"])
        answer = ask(signature, SearchSettings(**query["search"]))
        answers.write(answer.to_json() + "\n")
        answers.flush()


def _write(answers: TextIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content) + "\n")
    answers.flush()


def _opened(
    libraries: list[str], device: dict[str, Any]
) -> tuple[Callable[[ConvolutionSignature, SearchSettings], OracleAnswer], int]:
    """Load the driver or its stand-in, the libraries in their order, and cuDNN's frontend; describe the device."""
    try:
        ctypes.CDLL(SONAME, mode=ctypes.RTLD_GLOBAL)
    except OSError:
        with tempfile.TemporaryDirectory(prefix="gpufarm-cudnn-") as folder:
            stand_in = Path(folder, SONAME)
            write_driver_stand_in(stand_in, platform.machine())
            ctypes.CDLL(str(stand_in), mode=ctypes.RTLD_GLOBAL)  # stays loaded after its file is gone
    for library in libraries:
        loaded = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        if "libcudart" in library:
            runtime = ctypes.c_int()
            loaded.cudaRuntimeGetVersion(ctypes.byref(runtime))
            device = {**device, "driverVer": runtime.value}
    import cudnn  # the frontend finds the library that is loaded already

    properties = cudnn.create_device_properties(json.dumps(device))
    return _Asking(cudnn, properties).ask, cudnn.backend_version()


class _Asking:
    """Builds the plans of one convolution as PyTorch does."""

    def __init__(self, cudnn: Any, properties: Any) -> None:
        self._cudnn, self._properties = cudnn, properties
        kinds = cudnn.data_type
        self._dtypes = {
            "float32": kinds.FLOAT, "float16": kinds.HALF, "bfloat16": kinds.BFLOAT16, "float64": kinds.DOUBLE,
        }  # fmt: skip

    def ask(self, signature: ConvolutionSignature, search: SearchSettings) -> OracleAnswer:
        """Return the plans that build: the first, or with `benchmark` those that PyTorch measures."""
        limit = BENCHMARK_LIMIT if search.benchmark else 1
        plans: list[EnginePlan] = []
        for modes in self._sources(search):
            try:
                graph = self._graph(signature)
                graph.create_execution_plans(modes)
            except (RuntimeError, self._cudnn.cudnnGraphNotSupportedError):
                continue  # no configuration of this source
            self._deselect(graph, signature, search)
            for place in range(graph.get_execution_plan_count()):
                if len(plans) == limit:
                    return OracleAnswer(plans=tuple(plans))
                try:
                    graph.build_plan_at_index(place)
                    workspace_bytes = graph.get_workspace_size_plan_at_index(place)
                except (RuntimeError, self._cudnn.cudnnGraphNotSupportedError):
                    continue
                plans.append(EnginePlan(graph.get_plan_name_at_index(place), workspace_bytes))
        return OracleAnswer(plans=tuple(plans)) if plans else OracleAnswer(problem=NO_ENGINE)

    def _sources(self, search: SearchSettings) -> tuple[list[Any], ...]:
        """PyTorch asks the heuristics first, and the list of fallbacks where they leave nothing, or to benchmark."""
        modes = self._cudnn.heur_mode
        return [modes.B if search.heuristics == "B" else modes.A], [modes.FALLBACK]

    def _graph(self, signature: ConvolutionSignature) -> Any:
        dtype = self._dtypes[signature.dtype]
        computed_in = self._dtypes["float64" if signature.dtype == "float64" else "float32"]
        graph = self._cudnn.pygraph(
            io_data_type=dtype,
            intermediate_data_type=computed_in,
            compute_data_type=computed_in,
            device_property=self._properties,
        )

        def tensor(name: str, shape: tuple[int, ...]) -> Any:
            return graph.tensor(name=name, dim=list(shape), stride=list(signature.strides_of(shape)), data_type=dtype)

        geometry = {
            "stride": list(signature.stride),
            "padding": list(signature.padding),
            "dilation": list(signature.dilation),
        }
        if signature.operation == "forward":
            made = signature.response
            out = graph.conv_fprop(tensor("x", signature.image), tensor("w", signature.kernel), **geometry)
        elif signature.operation == "data_gradient":
            made = signature.image
            out = graph.conv_dgrad(tensor("dy", signature.response), tensor("w", signature.kernel), **geometry)
        else:
            made = signature.kernel
            out = graph.conv_wgrad(tensor("x", signature.image), tensor("dy", signature.response), **geometry)
        out.set_output(True).set_data_type(dtype).set_dim(list(made)).set_stride(list(signature.strides_of(made)))
        graph.validate()
        graph.build_operation_graph()
        return graph

    def _deselect(self, graph: Any, signature: ConvolutionSignature, search: SearchSettings) -> None:
        """Leave out what PyTorch leaves out (Conv_v8.cpp: filterEngineConfigs)."""
        notes = self._cudnn.numerical_note
        unwanted = [notes.NONDETERMINISTIC] if search.deterministic else []
        if signature.dtype == "float32" or not search.allow_tf32:
            unwanted.append(notes.DOWN_CONVERT_INPUTS)
            if not search.allow_tf32:
                unwanted.append(notes.TENSOR_CORE)
        if unwanted:
            graph.deselect_numeric_notes(unwanted)


if __name__ == "__main__":
    main()
