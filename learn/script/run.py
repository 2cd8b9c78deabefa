"""One run of a script, with torch as on a machine with a GPU: it leaves a record of its first two training steps.

Start reading at `ScriptRun.run`; `explain` locates a script's failure. `ScriptCompiler` is its torch.compile: modules
as `featurize.recording.compiled` models them, functions uncompiled.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import sysconfig
import threading
import traceback
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
from torch import nn

from conf.cli.own_packages import PACKAGES, ROOT
from conf.errors import CommandError, first_line
from conf.files.identity import aside_folder
from featurize.device.device_spec import device_from_mapping
from featurize.job.training_settings import GRAPH_MODES
from featurize.memory.cudnn_workspaces import search_settings
from featurize.nets.vision import mend_torchvision
from featurize.operators.cuda_policy import Autocast, as_on_cuda
from featurize.operators.replacing import replace_attribute, replace_in
from featurize.operators.torch_releases import complete, matmul_allows_tf32
from featurize.recording.block_record import AUTOTUNED, CudaGraphs, origin
from featurize.recording.compiled import CompiledRegions
from featurize.recording.step_trace import StepTrace
from featurize.timing.kernels import precision_in_words
from featurize.trace.tracer import STEPS
from featurize.training.training_step import AUTOCAST_DTYPES, WEIGHT_DTYPES
from learn.script.command_line import ScriptCommand
from learn.script.containment import DISTRIBUTED, contain
from learn.script.deepspeed_engine import install_deepspeed
from learn.script.fake_cuda import PretendCuda, enter_everywhere, install_cuda
from learn.script.process_group import REPLICA, RankZero, install_process_group
from learn.script.records import NOTES, SAVED, ScriptRecord, Setting, note, write_record
from learn.script.script_recorder import ScriptRecorder, StepWatch


def _parts_of_wrapper(module: nn.Module) -> list[nn.Module] | None:
    """Return the compiled parts of a model that PyTorch's wrappers divide, whose own code stays in Python: a replica's
    wrapped module, or the innermost units of shards. None for a model without a wrapper inside."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return [module.module]
    if (sharding := sys.modules.get("torch.distributed.fsdp")) is None:
        return None
    wrappers = sharding.FSDPModule, sharding.FullyShardedDataParallel
    units = [submodule for submodule in module.modules() if isinstance(submodule, wrappers)]
    if all(unit is module for unit in units):
        return None
    return [unit for unit in units if sum(isinstance(part, wrappers) for part in unit.modules()) == 1]


class ScriptCompiler:
    """The modules that a script has compiled: each has itself as `_orig_mod`, as torch's have the original."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        self._recorder = recorder
        self.regions: list[CompiledRegions] = []

    def install(self) -> None:
        """Replace torch.compile and `nn.Module.compile` in this process."""

        @replace_in("compile", torch)
        def compile_any(_compile: Any, model: Any = None, **kwargs: Any) -> Any:
            if model is None:
                return lambda given: torch.compile(given, **kwargs)
            if isinstance(model, nn.Module):
                return self._module(model, kwargs)

            @functools.wraps(model)
            def noting(*args: Any, **kwargs: Any) -> Any:
                note("torch.compile of a function was left out: it runs as it is written")
                return model(*args, **kwargs)

            return noting

        def state_of(module: nn.Module) -> dict[str, Any]:
            """Return the state of a module to copy or save: a copy of a compiled module runs uncompiled."""
            added_names = ("forward", "_orig_mod") if "_orig_mod" in vars(module) else ()
            return {name: value for name, value in vars(module).items() if name not in added_names and not saves(value)}

        def saves(value: Any) -> bool:
            """Return whether an attribute is the method that `containment` gives to modules that are not scripted."""
            return isinstance(value, functools.partial) and value.func is torch.jit.save

        setattr(nn.Module, "__getstate__", state_of)  # noqa: B010 -- before Python 3.11 there is none to replace
        replace_attribute(nn.Module, "compile", lambda module, *args, **kwargs: self._module(module, kwargs) and None)

    @property
    def capturing(self) -> bool:
        """Return whether a graph is being captured, in a thread of its own, in which no modes may be active."""
        return any(regions.capturing for regions in self.regions)

    def _module(self, module: nn.Module, given: Mapping[str, Any]) -> nn.Module:
        if "_orig_mod" in vars(module):
            return module
        if (parts := _parts_of_wrapper(module)) is not None:
            vars(module)["_orig_mod"] = module
            for part in parts:
                self._module(part, given)
            return module
        # The first capture imports it anyway, but torch 2.6 cannot do so below `DisableTorchFunction`, as in
        # `compiled_as_it_is`.
        import torch._functorch.aot_autograd

        forward = module.forward

        @functools.wraps(forward)
        def as_on_a_gpu(*args: Any, **kwargs: Any) -> Any:
            if self.capturing:  # decompositions would pass on the device that they read
                return forward(*args, **kwargs)
            with torch._C._EnableTorchFunction(), PretendCuda():
                return forward(*args, **kwargs)

        vars(module)["forward"] = as_on_a_gpu
        regions = CompiledRegions(module, [""], graphs=self._graphs(given))
        regions.recorder = self._recorder
        self.regions.append(regions)
        compiled = module.forward

        @functools.wraps(forward)
        def compiled_as_it_is(*args: Any, **kwargs: Any) -> Any:
            wrapper = nn.parallel.DistributedDataParallel._get_active_ddp_module()
            regions.buckets = None if wrapper is None else getattr(wrapper, REPLICA).limits
            with torch._C.DisableTorchFunction():  # the graphs are of meta tensors
                on_the_gpu = any(tensor.is_meta for tensor in module.parameters())
                return (compiled if on_the_gpu else as_on_a_gpu)(*args, **kwargs)

        vars(module)["forward"] = compiled_as_it_is
        vars(module)["_orig_mod"] = module  # not registered as a submodule: `parameters` and `state_dict` stay the same
        return module

    def _graphs(self, given: Mapping[str, Any]) -> CudaGraphs | None:
        """Return the CUDA graphs of a module by the arguments of torch.compile; one object for the whole script. Raises
        `RuntimeError` for an unknown mode, as torch.compile does."""
        mode = given.get("mode")
        if given.get("backend", "inductor") == "inductor":
            from torch._inductor import list_mode_options  # imports the compiler

            list_mode_options(mode)
        if isinstance(mode, str) and mode.startswith("max-autotune"):
            note(AUTOTUNED)
        if mode not in GRAPH_MODES and not (given.get("options") or {}).get("triton.cudagraphs"):
            return None
        self._recorder.memory.graphs = self._recorder.memory.graphs or CudaGraphs()
        return self._recorder.memory.graphs


_OWN = (
    ROOT.resolve() / "learn",
    ROOT.resolve() / "featurize",
    Path(sysconfig.get_path("stdlib")).resolve(),
    aside_folder().resolve(),
)


class ScriptRun:
    """One run of one script.

    Args:
        command: The fields of the `ScriptCommand`.
        device: The mapping of a `DeviceSpec`.
        folder: The folder of its record, and of its saved files.
    """

    def __init__(self, command: Mapping[str, Any], device: Mapping[str, Any], folder: str) -> None:
        self._command, self._spec = ScriptCommand(**command), device_from_mapping(device)
        self._script, self._from, self._folder = self._command.script, os.getcwd(), Path(folder)
        self._recorder, self._own_packages = ScriptRecorder(), OwnPackages()
        self._rank = RankZero(self._recorder, self._command)
        self._precisions: list[str] = []
        self._watch = StepWatch(self._recorder, self._rank, self.finish)
        self._compiler = ScriptCompiler(self._recorder)

    def run(self) -> None:
        """Run the script until its steps are done, and write the record. Never returns."""
        complete()
        mend_torchvision()
        self._files = contain(self._folder / SAVED)
        torch.__future__.set_swap_module_params_on_conversion(True)  # a parameter that moves stays the same object
        problem = None
        assume = self._recorder.values.assume
        with self._recorder.modules(), as_on_cuda(None, self._spec.architecture.attention, assume) as autocast:
            self._note_precisions(autocast)
            install_cuda(self._spec, self._recorder, autocast, gpus=self._command.per_node)
            self._watch.install(autocast.enter)
            install_process_group(self._rank)
            install_deepspeed(self._rank, self._watch)
            self._compiler.install()
            self._follow_threads()
            enter_everywhere(unless=lambda: self._compiler.capturing)
            with self._recorder, PretendCuda():
                try:
                    self._execute()
                except SystemExit as error:
                    if error.code not in (None, 0):
                        problem = f"{self._script} exits with {error.code!r}"
                        if isinstance(error.__context__, Exception):  # a framework has caught and printed it
                            problem += f" after {explain(error.__context__, self._script)}"
                except BaseException as error:  # a script may raise anything
                    traceback.print_exc()
                    problem = explain(error, self._script)
        self.finish(problem)

    def _execute(self) -> None:
        sys.argv = [self._script, *self._command.arguments]
        sys.path[0] = self._from if self._command.module else str(Path(self._script).resolve().parent)
        if (ROOT / "pyproject.toml").is_file():  # a checkout, whose other folders a script must not take for packages
            sys.path[1:] = [path for path in sys.path[1:] if not path or Path(path).resolve() != ROOT.resolve()]
        self._own_packages.make_way()
        if self._command.module:
            runpy.run_module(self._script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(self._script, run_name="__main__")

    def _follow_threads(self) -> None:
        """Enter the modes, which are per thread, in the threads that the script starts to load data ahead."""

        @replace_in("run", threading.Thread)
        def run_inside(run: Callable[[threading.Thread], None], thread: threading.Thread) -> None:
            if self._compiler.capturing:
                run(thread)
                return
            with self._recorder, PretendCuda():
                run(thread)

    def _note_precisions(self, autocast: Autocast) -> None:
        names = {dtype: name for name, dtype in AUTOCAST_DTYPES.items()}

        @replace_in("switched", autocast)
        def noting(switched: Callable[[Any], Any], dtype: Any) -> Any:
            if dtype in names and self._recorder.memory.step:
                self._precisions.append(names[dtype])
            return switched(dtype)

    def finish(self, problem: str | None = None) -> None:
        """Write the record and end the process immediately, with all of the script's threads."""
        self._own_packages.come_back()
        with torch._C.DisableTorchFunction():
            trace = self._trace() if self._watch.steps >= STEPS else None
            settings = self._settings()
        if trace is None:
            problem = problem or self._without_steps()
        else:
            problem, settings["precision_in_words"] = None, precision_in_words(trace, str(settings["precision"]))
        compiled = (text for regions in self._compiler.regions for text in regions.notes())
        for text in (*self._rank.remarks(), *compiled):
            note(text)
        record = ScriptRecord(
            trace=trace,
            problem=problem,
            settings=settings,
            batch_size=self._watch.batch_size or self._recorder.batch_size(),
            notes=tuple(NOTES),
            parallel=self._rank.layout(),
            files=self._files_looked_at(),
        )
        write_record(self._folder, record)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)

    def _without_steps(self) -> str:
        if self._watch.steps:
            return f"{self._script} ends after {self._watch.steps} optimizer step; two are needed"
        if not self._recorder.memory.events:
            return f"{self._script} ends without using cuda"
        last = f"; the last module to run was {self._recorder.stack.last}" if self._recorder.stack.last else ""
        return f"{self._script} ends without an optimizer step on cuda{last}"

    def _trace(self) -> StepTrace:
        recorder = self._recorder
        recorder.name_states()
        recorder.name_batches()
        recorder.stop()
        events, blocks = recorder.memory.final()
        return StepTrace(
            operators=tuple(recorder.log.operators),
            events=events,
            blocks=blocks,
            parameters=self._rank.parameters or recorder.parameters(),
            parameter_bytes=sum(block.nbytes for block in blocks if block.kind == "parameter"),
            compute_capability=self._spec.compute_capability,
            assumed=tuple(recorder.values.assumed),
            graph_input_bytes=recorder.memory.graphs.input_bytes if recorder.memory.graphs is not None else None,
            collectives=self._rank.collectives(),
        )

    def _settings(self) -> dict[str, Setting]:
        search = search_settings(benchmark=bool(torch.backends.cudnn.benchmark))
        precision = "tf32" if matmul_allows_tf32() else "fp32"
        if self._precisions:
            precision = max(set(self._precisions), key=self._precisions.count)
        elif (dtype := self._recorder.weight_dtype()) is not None:
            of_weights = {dtype: name for name, dtype in WEIGHT_DTYPES.items()}
            precision = of_weights.get(dtype, precision)
        micro = self._watch.most_backwards
        return {
            "optimizer": self._watch.optimizer_name,
            "precision": precision,
            "cudnn_benchmark": search.benchmark,
            "cudnn_allow_tf32": search.allow_tf32,
            "cudnn_deterministic": search.deterministic,
            "channels_last": self._recorder.channels_last(),
            "compile": bool(self._compiler.regions),
            **({"accumulation": micro} if micro > 1 else {}),
            **self._watch.seen,
        }

    def _files_looked_at(self) -> tuple[str, ...]:
        """Return the files of the script's own modules, and the paths that it read, relative to the working folder."""
        modules = [getattr(module, "__file__", None) for module in [*sys.modules.values()]]
        paths = {os.path.abspath(path) for path in modules if isinstance(path, str) and not is_installed(path)}
        paths |= self._files.looked_at()
        if not self._command.module:
            paths.discard(os.path.abspath(self._script))  # identified by its bytes
        return tuple(sorted(path.removeprefix(self._from + os.sep) for path in paths if not is_installed(path)))


class OwnPackages(MetaPathFinder):
    """The packages of this project, hidden while a script runs that has others of the same names.

    Loaded modules of this project keep working, as they hold their imports. They import nothing more of each other
    until `come_back`.
    """

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._ours: dict[str, types.ModuleType] = {}

    def make_way(self) -> None:
        """Remove the packages that `sys.path` also has elsewhere from `sys.modules`."""
        self._names = tuple(name for name in PACKAGES if _elsewhere(name) is not None)
        self._ours = {name: sys.modules.pop(name) for name in list(sys.modules) if self._is_hidden(name)}
        sys.meta_path.insert(0, self)

    def come_back(self) -> None:
        """Restore this project's packages after the script."""
        for name in list(sys.modules):
            if self._is_hidden(name):
                del sys.modules[name]
        sys.modules.update(self._ours)
        self._names = ()

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Find the script's own package, even without an `__init__.py`, where an installed one of ours would win."""
        return _elsewhere(fullname) if fullname in self._names else None

    def _is_hidden(self, name: str) -> bool:
        return name.partition(".")[0] in self._names


def _elsewhere(name: str) -> ModuleSpec | None:
    """Find a module or package that is not this project's; None where none has code."""
    spec = PathFinder.find_spec(name, [entry for entry in sys.path if Path(entry).resolve() != ROOT.resolve()])
    if spec is None or spec.origin is not None:
        return spec
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    return spec if any(next(folder.glob(form), None) for folder in folders for form in ("*.py", "*/*.py")) else None


def explain(error: BaseException, script: str) -> str:
    """Return one line that describes a script's error.

    Args:
        error: The exception, with its traceback.
        script: The script's path, or its module's name.
    """
    folders = (Path(script).resolve().parent, Path.cwd())
    frames, near = _frames(error, folders)
    while error.__cause__ is not None:  # a framework's error, raised from the user's
        its_frames, its_near = _frames(error.__cause__, folders)
        if not its_near:
            break
        error, frames, near = error.__cause__, its_frames, its_near
    where = next((f"{frame.filename}:{frame.lineno}: " for frame in reversed(near or frames)), "")
    if isinstance(error, CommandError):  # this project refuses an action of that line
        return f"{where}{error}"
    operator, module = origin(error)
    source = f" in operator {operator}" if operator else ""
    source += f" of module {module!r}" if module else ""
    text = first_line(error) if isinstance(error, Exception) else str(error)
    if isinstance(error, KeyError) and error.args and error.args[0] in DISTRIBUTED:
        text += "; the script expects a launcher: estimate the command that starts it, such as torchrun "
        text += "--nproc-per-node 8 train.py"
    return f"{where}{type(error).__name__}{source}: {text}"


def _frames(
    error: BaseException, folders: tuple[Path, ...]
) -> tuple[list[traceback.FrameSummary], list[traceback.FrameSummary]]:
    """Return the frames of code that the user may have written, and those of them below the folders."""
    all_frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in all_frames if not frame.filename.startswith("<") and not is_installed(frame.filename)]
    return frames, [f for f in frames if any(Path(f.filename).resolve().is_relative_to(folder) for folder in folders)]


@functools.cache
def _is_installed(path: Path) -> bool:
    path = path.resolve()
    is_own = any(path.is_relative_to(folder) for folder in _OWN)
    return is_own or any(part in ("site-packages", "dist-packages", "torch") for part in path.parts)


def is_installed(filename: str) -> bool:
    """Return whether a file is the standard library's, an installed library's, or this project's own code."""
    path = Path(filename).absolute()
    if os.path.islink(path):  # unlike `Path.is_symlink`, False for a name that the system refuses
        path = path.resolve()
    # Libraries have thousands of files in hundreds of folders, and resolving a path looks at each folder above it.
    return _is_installed(path.parent) or _is_installed(path)
