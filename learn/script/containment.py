"""Keeps a script from saving, logging to services, using the network, scripting and starting workers.

Start reading at `contain`. It stops honest scripts from side effects; it is not a sandbox against hostile ones.
"""

from __future__ import annotations

import dis
import functools
import inspect
import os
import socket
import sys
import types
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from featurize.operators.replacing import replace_attribute, replace_in
from learn.script.records import note
from learn.script.saved_files import SavedFiles, install_saving

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "WANDB_MODE": "disabled",
    "COMET_MODE": "DISABLED",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "PL_DISABLE_FORK": "1",
}
# Variables that torchrun and accelerate set for one of several processes: here there is one process.
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
# Arguments of a `DataLoader` that loads in the process itself.
_WITHOUT_WORKERS = {
    "num_workers": 0,
    "pin_memory": False,
    "pin_memory_device": "",
    "persistent_workers": False,
    "prefetch_factor": None,
    "multiprocessing_context": None,
    "timeout": 0,
}
_LOOPBACK = ("127.", "::1", "localhost")
_LOGGERS = (
    "wandb",
    "mlflow",
    "comet_ml",
    "neptune",
    "aim",
    "clearml",
    "swanlab",
    "tensorboardX",
    "torch.utils.tensorboard",
)


def contain(saved: Path) -> SavedFiles:
    """Replace the functions that save, connect, compile and start workers, in this process. Returns the files that the
    script reads, and those that it saves, which go to a folder."""
    files = SavedFiles(saved)
    install_saving(files)
    files.install()
    _refuse_connections()
    _run_eagerly()
    replace_attribute(torch, "inference_mode", _without_gradients)
    _load_in_this_process()
    sys.meta_path.insert(0, SilentLoggers())

    @replace_in("_maybe_opt_step", torch.amp.GradScaler)
    def always_step(_maybe_step: Any, _scaler: Any, optimizer: Any, _state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)  # without values, no gradient is known to be infinite

    return files


def _refuse_connections() -> None:
    def is_local(event: str, args: tuple[Any, ...]) -> bool:
        if event == "socket.connect":
            is_internet = args[0].family in (socket.AF_INET, socket.AF_INET6)
            return not is_internet or str(args[1][0]).startswith(_LOOPBACK)
        host = args[0]
        is_name = isinstance(host, str) and host and not host.startswith(_LOOPBACK) and not host[0].isdigit()
        return not is_name or host == socket.gethostname()

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo") and not is_local(event, args):
            note("a network connection was refused: scripts run offline here")
            if event == "socket.connect":
                raise ConnectionRefusedError("no network while a script is estimated")
            raise socket.gaierror(socket.EAI_FAIL, "no network while a script is estimated")

    sys.addaudithook(refuse)


def _run_eagerly() -> None:
    def not_scripted(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        note("TorchScript was left out: its functions and modules run as they are written")
        if isinstance(function, torch.nn.Module):
            vars(function).setdefault("save", functools.partial(torch.jit.save, function))
        return function if function is not None else lambda given: given

    for name in ("script", "trace", "freeze", "optimize_for_inference", "script_if_tracing"):
        replace_attribute(torch.jit, name, not_scripted)


def _without_gradients(mode: Any = True) -> Any:
    """Replace `torch.inference_mode`, in which a dispatch mode sees composite operators undivided. With mode False, it
    records gradients (c10/core/InferenceMode.h)."""
    if callable(mode):  # used as a decorator
        return torch.no_grad()(mode)
    return torch.no_grad() if mode else torch.enable_grad()


def _load_in_this_process() -> None:
    signature = inspect.signature(DataLoader.__init__)

    @replace_in("__init__", DataLoader)
    def init(make: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("num_workers"):
            note("data loaders run in the script's own process: num_workers was put to 0")
        given.arguments.update({name: value for name, value in _WITHOUT_WORKERS.items() if name in given.arguments})
        make(*given.args, **given.kwargs)


def leave_out_distributed() -> None:
    """Remove the variables of a launcher of several processes, and set those that keep libraries offline."""
    if os.environ.get("WORLD_SIZE") != "1":
        for name in DISTRIBUTED:
            os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)


class SilentLoggers(MetaPathFinder, Loader):
    """Make imports of experiment loggers return a module that accepts every call and does nothing."""

    def find_spec(self, fullname: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        logger = _logger_of(fullname)
        if logger is None or (not _is_installed(logger) and is_ready_for_its_absence()):
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Silent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...


class _Silent(types.ModuleType):
    """An object whose attributes can be called, entered, indexed and nested."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Silent(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        note(f"{_logger_of(self.__name__)} was kept from logging")
        if len(args) == 1 and not kwargs and inspect.isfunction(args[0]):  # a decorator
            return args[0]
        return self

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None: ...

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter(())


def _logger_of(name: str) -> str | None:
    return next((logger for logger in _LOGGERS if f"{name}.".startswith(f"{logger}.")), None)


def _is_installed(logger: str) -> bool:
    """Return whether a package is installed. wandb may leave a mere folder of its name in the working folder."""
    spec = PathFinder.find_spec("tensorboard" if logger == "torch.utils.tensorboard" else logger)
    return spec is not None and spec.origin is not None


def is_ready_for_its_absence() -> bool:
    """Return whether the import is inside a `try`, or only tests whether the module exists."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        if frame.f_code.co_name == "find_spec" and frame.f_globals["__name__"] == "importlib.util":
            return True
        frame = frame.f_back
    if frame is None:
        return False
    code: Any = dis.Bytecode(frame.f_code)
    handlers = code.exception_entries  # those with `lasti` belong to `with`, and to `except` itself
    return any(entry.start <= frame.f_lasti < entry.end and not entry.lasti for entry in handlers)
