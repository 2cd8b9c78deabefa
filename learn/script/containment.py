"""Keeps a script from saving, logging to services, using the network, scripting and starting workers.

Start reading at `contain`. It stops honest scripts from side effects; it is no sandbox against hostile ones.
"""

from __future__ import annotations

import functools
import inspect
import os
import socket
import sys
from pathlib import Path
from typing import Any

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
_LOOPBACK = ("127.", "::1", "localhost")


class Notes:
    """What was kept from happening, each said once."""

    def __init__(self) -> None:
        self._texts: dict[str, None] = {}

    def add(self, text: str) -> None:
        """Note this, unless it is noted already."""
        self._texts.setdefault(text)

    def all(self) -> tuple[str, ...]:
        """Return the notes in the order of their first occurrence."""
        return tuple(self._texts)


def contain(notes: Notes, saved: Path) -> None:
    """Replace what saves, connects, compiles and starts workers, in this process.

    Args:
        notes: Takes a note of what was kept from happening.
        saved: A folder for what the script saves.
    """
    files = SavedFiles(saved, notes.add)
    install_saving(files, notes.add)
    files.install()
    _refuse_connections(notes)
    _run_eagerly(notes)
    replace_attribute(torch, "inference_mode", _NoGrad)
    _load_in_this_process(notes)
    sys.meta_path.insert(0, SilentLoggers(notes.add))

    def always_step(self: Any, optimizer: Any, optimizer_state: Any, *args: Any, **kwargs: Any) -> Any:
        return optimizer.step(*args, **kwargs)  # nobody knows of an infinite gradient

    replace_attribute(torch.amp.GradScaler, "_maybe_opt_step", always_step)


def _refuse_connections(notes: Notes) -> None:
    class Socket(socket.socket):
        def connect(self, address: Any) -> None:
            self._refuse(address)
            super().connect(address)

        def connect_ex(self, address: Any) -> int:
            self._refuse(address)
            return super().connect_ex(address)

        def _refuse(self, address: Any) -> None:
            if self.family not in (socket.AF_INET, socket.AF_INET6) or str(address[0]).startswith(_LOOPBACK):
                return
            notes.add("a network connection was refused: scripts run offline here")
            raise ConnectionRefusedError("no network while a script is estimated")

    replace_attribute(socket, "socket", Socket)
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if (
            isinstance(host, str)
            and host
            and not host.startswith(_LOOPBACK)
            and not host[0].isdigit()
            and host != socket.gethostname()
        ):
            notes.add("a network connection was refused: scripts run offline here")
            raise socket.gaierror(socket.EAI_FAIL, "no network while a script is estimated")
        return resolve(host, *args, **kwargs)

    replace_attribute(socket, "getaddrinfo", getaddrinfo)


def _run_eagerly(notes: Notes) -> None:
    def not_scripted(function: Any = None, *args: Any, **kwargs: Any) -> Any:
        notes.add("TorchScript was left out: its functions and modules run as they are written")
        if isinstance(function, torch.nn.Module):
            vars(function).setdefault("save", functools.partial(torch.jit.save, function))
        return function if function is not None else lambda given: given

    for name in ("script", "trace", "freeze", "optimize_for_inference", "script_if_tracing"):
        replace_attribute(torch.jit, name, not_scripted)


class _NoGrad(torch.no_grad):
    """In the place of `torch.inference_mode`, in which composite operators reach a dispatch mode undivided."""

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


def _load_in_this_process(notes: Notes) -> None:
    made = DataLoader.__init__
    signature = inspect.signature(made)

    @functools.wraps(made)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("num_workers"):
            notes.add("data loaders run in the script's own process: num_workers was put to 0")
        for name, value in (
            ("num_workers", 0), ("pin_memory", False), ("persistent_workers", False), ("prefetch_factor", None),
            ("multiprocessing_context", None), ("timeout", 0),
        ):  # fmt: skip
            if name in given:
                given[name] = value
        given.pop("pin_memory_device", None)
        given.pop("self")
        more = given.pop("kwargs", {})
        made(self, **given, **more)

    replace_attribute(DataLoader, "__init__", init)


def leave_out_distributed() -> None:
    """Forget that a launcher started several processes, and set what keeps libraries offline."""
    if os.environ.get("WORLD_SIZE") != "1":
        for name in DISTRIBUTED:
            os.environ.pop(name, None)
    os.environ.update(ENVIRONMENT)
