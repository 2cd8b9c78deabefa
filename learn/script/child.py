"""The process that runs a script, with torch as on a machine with a GPU, and leaves a record of its training step.

Start reading at `main`. A keeper runs this file (`conf.children`), with this project first on the path.
"""

from __future__ import annotations

import json
import os
import resource
import runpy
import sys
import threading
import traceback
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from learn.script.choices import Setting
    from learn.script.compiling import ScriptCompiler
    from learn.script.containment import Notes
    from learn.script.script_recorder import ScriptRecorder
    from learn.script.step_watch import StepWatch

ROOT = Path(__file__).resolve().parents[2]
# Of a model whose weights are all of that type.
_LOW_PRECISIONS = {"torch.bfloat16": "bf16-true", "torch.float16": "fp16-true"}


def main(request_path: str) -> None:
    """Run the script of a request, as `learn.script.estimating` writes it."""
    request = json.loads(Path(request_path).read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from featurize.light_imports import without_compiler
    from learn.script.containment import leave_out_distributed

    if request["launch"] is None:  # wrappers of several ranks import it in any case
        without_compiler()
    leave_out_distributed()
    os.environ.update(request["environment"])
    _Run(request).run()


class _Run:
    """One run of one script."""

    def __init__(self, request: dict[str, Any]) -> None:
        from featurize.device_spec import device_from_mapping
        from learn.script.containment import Notes
        from learn.script.making_way import OwnPackages
        from learn.script.rank_zero import RankZero
        from learn.script.script_recorder import ScriptRecorder

        self.path, self.saved = Path(request["record"]), Path(request["saved"])
        self.spec = device_from_mapping(request["device"])
        self.script, self.module, self.arguments = request["script"], request["module"], request["arguments"]
        self.notes: Notes = Notes()
        self.recorder: ScriptRecorder = ScriptRecorder()
        launch = request["launch"]
        self.rank = RankZero(self.recorder, **(launch or {}))
        self.gpus = min(launch["launched"], launch["gpus_per_node"]) if launch else 1
        self.watch: StepWatch | None = None
        self.compiler: ScriptCompiler | None = None
        self.precisions: list[str] = []
        self.own_packages = OwnPackages()

    def run(self) -> None:
        """Run the script until its steps are done, and leave the record. Never returns."""
        import torch

        from featurize.autocast import Autocast
        from featurize.cuda_policy import as_on_cuda
        from featurize.releases import complete
        from featurize.vision import mend_torchvision
        from learn.script.compiling import ScriptCompiler
        from learn.script.containment import contain
        from learn.script.deepspeed_modules import install_deepspeed
        from learn.script.device_mode import PretendCuda, enter_everywhere
        from learn.script.explaining import explained
        from learn.script.fake_cuda import install
        from learn.script.process_group import install_process_group
        from learn.script.step_watch import StepWatch

        complete()
        mend_torchvision()
        contain(self.notes, self.saved)
        torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter that moves stays the same object
        problem = None
        assume = self.recorder.values.assume
        with self.recorder.modules(), as_on_cuda(None, self.spec.architecture.attention, assume) as enter_policy:
            assert isinstance(enter_policy, types.MethodType)
            autocast = enter_policy.__self__
            assert isinstance(autocast, Autocast)
            self._note_precisions(autocast)
            self.watch = StepWatch(self.recorder, enter_policy, self.finish)
            install(self.spec, self.recorder, autocast, gpus=self.gpus)
            self.watch.install()
            self.watch.on_end, self.watch.on_begin = self.rank.end_step, self.rank.begin_step
            self.watch.on_backward, self.watch.on_backward_end = self.rank.begin_backward, self.rank.end_backward
            install_process_group(self.rank, self.notes.add)
            install_deepspeed(self.rank, self.watch, self.notes.add)
            self.compiler = ScriptCompiler(self.recorder, self.notes.add)
            self.compiler.install()
            self._follow_threads()
            enter_everywhere(unless=lambda: self.compiler is not None and self.compiler.capturing)
            with self.recorder, PretendCuda():
                try:
                    self._execute()
                except SystemExit as error:
                    if error.code not in (None, 0):
                        problem = f"{self.script} exits with {error.code!r}"
                        if isinstance(error.__context__, Exception):  # which a framework has caught and shown
                            problem += f" after {explained(error.__context__, self.script)}"
                except BaseException as error:  # whatever a script may raise
                    traceback.print_exc()
                    problem = explained(error, self.script)
        self.finish(problem)

    def _execute(self) -> None:
        sys.argv = [self.script, *self.arguments]
        sys.path[0] = os.getcwd() if self.module else str(Path(self.script).resolve().parent)
        if (ROOT / "pyproject.toml").is_file():  # a checkout, whose other folders a script must not take for packages
            sys.path[1:] = [path for path in sys.path[1:] if not path or Path(path).resolve() != ROOT]
        self.own_packages.make_way()
        if self.module:
            runpy.run_module(self.script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self.script, run_name="__main__")

    def _follow_threads(self) -> None:
        """Modes belong to threads: those that the script starts, to load data ahead, enter them too."""
        from featurize.replacing import replace_attribute
        from learn.script.device_mode import PretendCuda

        run = threading.Thread.run

        def run_inside(thread: threading.Thread) -> None:
            if self.compiler is not None and self.compiler.capturing:
                run(thread)
                return
            with self.recorder, PretendCuda():
                run(thread)

        replace_attribute(threading.Thread, "run", run_inside)

    def _note_precisions(self, autocast: Any) -> None:
        from featurize.training import AUTOCAST_DTYPES

        names = {dtype: name for name, dtype in AUTOCAST_DTYPES.items()}
        switched = autocast.switched

        def noting(dtype: Any) -> Any:
            if dtype in names and self.recorder.step:
                self.precisions.append(names[dtype])
            return switched(dtype)

        autocast.switched = noting

    def finish(self, problem: str | None = None) -> None:
        """Leave the record and end the process at once, with whatever threads the script has."""
        self.own_packages.come_back()
        import torch

        from featurize.trace import STEPS
        from learn.script.record_file import ScriptRecord, write_record

        assert self.watch is not None
        watch, recorder = self.watch, self.recorder
        with torch._C.DisableTorchFunction():
            trace = self._trace(recorder) if watch.steps >= STEPS else None
            settings = self._settings(watch)
        if trace is None and problem is None:
            problem = self._without_steps()
        for note in self.rank.remarks():
            self.notes.add(note)
        record = ScriptRecord(
            trace=trace,
            problem=problem if trace is None else None,
            settings=settings,
            batch_size=watch.batch_size or recorder.batch_size(),
            backwards=watch.most_backwards,
            steps=watch.steps,
            notes=(*self.notes.all(), *(self.compiler.notes() if self.compiler is not None else ())),
            parallel=self.rank.layout(),
        )
        write_record(self.path, record)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _without_steps(self) -> str:
        assert self.watch is not None
        recorder = self.recorder
        if self.watch.steps:
            return f"{self.script} ends after {self.watch.steps} optimizer step; two are needed"
        if not recorder.events:
            return f"{self.script} ends without using cuda"
        last = f"; the last module to run was {recorder.last_module}" if recorder.last_module else ""
        return f"{self.script} ends without an optimizer step on cuda{last}"

    def _trace(self, recorder: ScriptRecorder) -> Any:
        from featurize.step_trace import StepTrace

        recorder.name_states()
        recorder.name_batches()
        recorder.stop()
        blocks = recorder.final_blocks()
        return StepTrace(
            operators=tuple(recorder.operators),
            events=tuple(recorder.events),
            blocks=tuple(blocks),
            parameters=self.rank.parameters(),
            parameter_bytes=sum(block.nbytes for block in blocks if block.kind == "parameter"),
            compute_capability=self.spec.compute_capability,
            assumed=tuple(recorder.values.assumed),
            graph_input_bytes=recorder.graphs.input_bytes if recorder.graphs is not None else None,
            collectives=self.rank.collectives(),
        )

    def _settings(self, watch: StepWatch) -> dict[str, Setting]:
        import torch

        from featurize.cudnn.workspaces import search_settings
        from featurize.tf32 import matmul_allows_tf32

        search = search_settings(benchmark=bool(torch.backends.cudnn.benchmark))
        precision = "tf32" if matmul_allows_tf32() else "fp32"
        if self.precisions:
            precision = max(set(self.precisions), key=self.precisions.count)
        elif (dtype := self.recorder.weight_dtype()) is not None:
            precision = _LOW_PRECISIONS.get(str(dtype), precision)
        accumulation = {"accumulation": watch.most_backwards} if watch.most_backwards > 1 else {}
        return {
            "optimizer": watch.optimizer_name,
            "precision": precision,
            "cudnn_benchmark": search.benchmark,
            "cudnn_allow_tf32": search.allow_tf32,
            "cudnn_deterministic": search.deterministic,
            "channels_last": self.recorder.channels_last(),
            **accumulation,
            **watch.choices.seen,
        }


if __name__ == "__main__":
    main(sys.argv[1])
