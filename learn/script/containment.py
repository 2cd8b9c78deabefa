"""Keeps a script from saving, logging to services, using the network, scripting and starting workers.

Start reading at `contain`. It stops honest scripts from side effects; it is no sandbox against hostile ones.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from featurize.replacing import replace_attribute
from learn.script.loggers import SilentLoggers
from learn.script.saved_files import SavedFiles
from learn.script.saved_tensors import install_saving

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
# What torchrun and accelerate set for one of several processes: here there is one.
DISTRIBUTED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
# Arguments of a `DataLoader` that loads in the process itself.
_WITHOUT_WORKERS = {
    "num_workers": 0, "pin_memory": False, "pin_memory_device": "", "persistent_workers": False,
    "prefetch_factor": None, "multiprocessing_context": None, "timeout": 0,
}  # fmt: skip
_LOOPBACK = ("127.", "::1", "localhost")


def contain(note: Callable[[str], None], saved: Path) -> SavedFiles:
    """Replace what saves, connects, compiles and starts workers, in this process.

    Args:
        note: Called with what was kept from happening.
        saved: A folder for what the script saves.

    Returns:
        The files that the script saves and looks at.
    """
    files = SavedFiles(saved, note)
    install_saving(files, note)
    files.install()
    _refuse_connections(note)
    _run_eagerly(note)
    replace_attribute(torch, "inference_mode", _NoGrad)
    _load_in_this_process(note)
    sys.meta_path.insert(0, SilentLoggers(note))

    def always_step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)  # nobody knows of an infinite gradient

    replace_attribute(torch.amp.GradScaler, "_maybe_opt_step", always_step)
    return files


def _refuse_connections(note: Callable[[str], None]) -> None:
    def refuse(error: OSError) -> NoReturn:
        note("a network connection was refused: scripts run offline here")
        raise error

    class Socket(socket.socket):
        def connect(self, address: Any) -> None:
            self._require_local(address)
            super().connect(address)

        def connect_ex(self, address: Any) -> int:
            self._require_local(address)
            return super().connect_ex(address)

        def _require_local(self, address: Any) -> None:
            if self.family in (socket.AF_INET, socket.AF_INET6) and not str(address[0]).startswith(_LOOPBACK):
                refuse(ConnectionRefusedError("no network while a script is estimated"))

    replace_attribute(socket, "socket", Socket)
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        is_name = isinstance(host, str) and host and not host.startswith(_LOOPBACK) and not host[0].isdigit()
        if is_name and host != socket.gethostname():
            refuse(socket.gaierror(socket.EAI_FAIL, "no network while a script is estimated"))
        return resolve(host, *args, **kwargs)

    replace_attribute(socket, "getaddrinfo", getaddrinfo)


def _run_eagerly(note: Callable[[str], None]) -> None:
    def not_scripted(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        note("TorchScript was left out: its functions and modules run as they are written")
        if isinstance(function, torch.nn.Module):
            vars(function).setdefault("save", functools.partial(torch.jit.save, function))
        return function if function is not None else lambda given: given

    for name in ("script", "trace", "freeze", "optimize_for_inference", "script_if_tracing"):
        replace_attribute(torch.jit, name, not_scripted)


class _NoGrad(torch.no_grad):
    """Stands for `torch.inference_mode`, in which composite operators reach a dispatch mode undivided."""

    def __new__(cls, mode: Any = True) -> Any:
        return object.__new__(cls) if isinstance(mode, bool) else cls()(mode)

    def __init__(self, mode: bool = True) -> None:
        super().__init__()
        self.mode = mode

    def __enter__(self) -> None:
        if self.mode:
            super().__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.mode:
            super().__exit__(*error)

    def clone(self) -> _NoGrad:
        return type(self)(self.mode)


def _load_in_this_process(note: Callable[[str], None]) -> None:
    made = DataLoader.__init__
    signature = inspect.signature(made)

    @functools.wraps(made)
    def init(*args: Any, **kwargs: Any) -> None:
        given = signature.bind(*args, **kwargs)
        if given.arguments.get("num_workers"):
            note("data loaders run in the script's own process: num_workers was put to 0")
        given.arguments.update({name: value for name, value in _WITHOUT_WORKERS.items() if name in given.arguments})
        made(*given.args, **given.kwargs)

    replace_attribute(DataLoader, "__init__", init)


def leave_out_distributed() -> None:
    """Forget that a launcher started several processes, and set what keeps libraries offline."""
    if os.environ.get("WORLD_SIZE") != "1":
        for name in DISTRIBUTED:
            os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
