"""Keeps a script from saving, logging to services, using the network, scripting and starting workers.

Start reading at `contain`. It stops honest scripts from side effects; it is not a sandbox against hostile ones. Files
that a script saves are written to a folder that is removed, and read back from there (`SavedFiles`); files that it
writes by other means are written to their own path. `install_saving` makes checkpoints hold the shapes of tensors
without values: a file that is read back has tensors of the same shapes, on the same device.
"""

from __future__ import annotations

import builtins
import contextlib
import copy
import dis
import errno
import functools
import importlib.util
import inspect
import io
import json
import os
import re
import shutil
import socket
import stat
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from featurize.operators.replacing import replace_attribute, replace_in, replaced
from learn.script.fake_cuda import names_cuda
from learn.script.records import note

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


NOTE = "files that the script saves were kept in a folder that is removed"
# Names of functions, in any library and in the script, inside which files count as saved. Data sets that are saved to
# disk are read by C++, which does not know the other folder.
_SAVES = re.compile(
    r"_*(atomic_)?save(_(?!to_disk)\w+|fig|z|z_compressed|txt)?"
    r"|_*(write|dump|remove|delete|rotate|prune|clean|cleanup)_\w*checkpoints?(_\w+)?"
)
_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".pth.tar")
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_OF_SYSTEM = ("/proc/", "/sys/", "/dev/")
# Functions of `os` whose first argument is a path -> the method that replaces them.
FUNCTIONS = {
    **dict.fromkeys(("stat", "lstat", "access", "readlink", "listxattr", "getxattr", "statvfs"), "_look"),
    **dict.fromkeys(("setxattr", "utime", "chmod", "chown", "truncate"), "_alter"),
    **dict.fromkeys(("remove", "unlink", "rmdir"), "_take_away"),
    **dict.fromkeys(("rename", "replace"), "_move"),
    **dict.fromkeys(("symlink", "link"), "_point"),
    "open": "_open",
    "mkdir": "_mkdir",
    "listdir": "_listdir",
    "scandir": "_scandir",
}


class SavedFiles:
    """The files that a script has saved. A path keeps its name below `root`, and is looked up there first."""

    def __init__(self, root: Path) -> None:
        self._root = os.path.abspath(root)
        self._apart = os.path.dirname(self._root) + os.sep  # folder of this project's own files
        self._used = False
        self._removed: set[str] = set()  # paths that the script has removed while saving, and that still exist
        self._looked_at: dict[str, bool] = {}  # path, with a slash at the end where it was listed -> whether it existed
        self._os: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in FUNCTIONS if hasattr(os, name)}
        self._open_file = builtins.open

    def install(self) -> None:
        """Replace the functions of Python that open, list, make and remove files, in this process."""
        replace_attribute(builtins, "open", self.open)
        replace_attribute(io, "open", self.open)
        for name, function in self._os.items():
            replace_attribute(os, name, self._standing_for(function, getattr(self, FUNCTIONS[name])))
        supported = (os.supports_fd, os.supports_follow_symlinks, os.supports_dir_fd, os.supports_effective_ids)
        for functions in supported:  # os.supports_fd and the like: sets of the functions themselves
            functions.update({getattr(os, name) for name, real in self._os.items() if real in functions})
        replace_attribute(shutil, "rmtree", self._standing_for(shutil.rmtree, self._take_away))

    def _standing_for(self, function: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            by_number = any(value is not None for name, value in kwargs.items() if name.endswith("dir_fd"))
            if by_number or self._full(path) is None:
                return function(path, *args, **kwargs)
            return method(function, path, *args, **kwargs)

        # A partial is not bound by classes that hold it.
        return functools.update_wrapper(functools.partial(call), function)

    # -- the location of a path

    def at(self, path: Any) -> Any:
        """Return the location of a path's content: in the folder if it was saved. Raises `FileNotFoundError`."""
        if (full := self._full(path)) is None:
            return path
        self._looked_at.setdefault(full, self._there(full))
        if not self._used:
            return path
        redirected = self._root + full
        if self._there(redirected) and not (
            self._is_folder(redirected) and self._is_folder(full) and not self._gone(full)
        ):
            return redirected
        if self._gone(full):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return path

    def into(self, path: Any) -> str:
        """Return the path to save a file to; its folder is created."""
        full = self._full(path)
        assert full is not None, "a path outside this project's own"
        self._used = True
        redirected = self._root + full
        self._make_folders(os.path.dirname(redirected))
        if stat.S_ISLNK(self._mode(redirected)):
            self._os["unlink"](redirected)
        return redirected

    def takes(self, path: Any) -> bool:
        """Return whether a write to a path now counts as saving."""
        if (full := self._full(path)) is None:
            return False
        if (mode := self._mode(full)) and not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):
            return False  # a device
        if full.endswith(_SUFFIXES) or _a_saver_runs():
            return True
        folder = os.path.dirname(full)
        return self._used and (
            self._there(self._root + full)
            or self._gone(full)
            or (self._there(self._root + folder) and not self._there(folder))
        )

    def looked_at(self) -> set[str]:
        """Return the paths that were read, except the system's and those that have appeared since."""
        return {
            path
            for path, was_there in self._looked_at.items()
            if (was_there or not self._there(path)) and not path.startswith(_OF_SYSTEM)
        }

    def _full(self, path: Any) -> str | None:
        """Return the absolute path; None for the number of an open file, a name that no file can have, and this
        project's own files."""
        try:
            full = os.path.abspath(os.fsdecode(path))
        except TypeError:
            return None
        return None if full.startswith(self._apart) or "\0" in full else full

    def _mode(self, path: str) -> int:
        try:
            return int(self._os["lstat"](path).st_mode)
        except (OSError, ValueError):
            return 0

    def _there(self, path: str) -> bool:
        return self._mode(path) != 0

    def _is_folder(self, path: str) -> bool:
        return stat.S_ISDIR(self._mode(path))

    def _gone(self, full: str) -> bool:
        return any(full == removed or full.startswith(removed + os.sep) for removed in self._removed)

    def _make_folders(self, redirected: str) -> None:
        if not self._there(redirected):
            self._make_folders(os.path.dirname(redirected))
            self._os["mkdir"](redirected)

    # -- replacements of Python's own functions

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        """Open a file as Python's own function does; a saved one is opened in the folder."""
        writes = bool(set(mode) & set("wax+"))
        if "x" in mode and self.takes(file):
            self._require_new(file)
        place = self._place(file, writes=writes, with_content="a" in mode or "r" in mode)
        return self._open_file(place, mode, *args, **kwargs)

    def _require_new(self, path: Any) -> None:
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    def _place(self, path: Any, *, writes: bool, with_content: bool = True) -> Any:
        """Return the location at which a file is read or written: while saving, it is written in the folder, beginning
        with the existing content if `with_content`."""
        if not writes:
            return self.at(path)
        if not self.takes(path):
            return path
        note(NOTE)
        before = self.at(path) if with_content and os.path.lexists(path) else None
        redirected = self.into(path)
        if before is not None and before != redirected:
            with self._open_file(before, "rb") as source, self._open_file(redirected, "wb") as target:
                shutil.copyfileobj(source, target)
        return redirected

    def _look(self, function: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self.at(path), *args, **kwargs)

    def _alter(self, function: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> Any:
        """Change a file's content or attributes; while saving, those of the copy in the folder."""
        return function(self._place(path, writes=os.path.isfile(path)), *args, **kwargs)

    def _open(self, function: Callable[..., int], path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        return function(self._place(path, writes=bool(flags & _WRITING)), flags, *args, **kwargs)

    def _mkdir(self, function: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        if self.takes(path):
            self._require_new(path)
            self._make_folders(self.into(path))
        else:
            function(path, *args, **kwargs)

    def _take_away(self, function: Callable[..., None], path: Any, *args: Any, **kwargs: Any) -> None:
        """Remove a file or folder. While saving, one that the script did not save is only marked as removed."""
        full = self._full(path)
        if full is None or not self.takes(path) or not os.path.lexists(path):
            function(path, *args, **kwargs)
            return
        if self._there(self._root + full):
            function(self._root + full, *args, **kwargs)
        if self._there(full):
            self._used = True
            self._removed.add(full)

    def _move(self, function: Callable[..., None], source: Any, target: Any, **kwargs: Any) -> None:
        if not (self.takes(source) or self.takes(target)) or not os.path.lexists(source):
            function(source, target, **kwargs)
            return
        place, full = self.at(source), self._full(source)
        redirected = self.into(target)
        if full is not None and place == self._root + full:
            function(place, redirected)
        else:
            self._borrow(os.path.abspath(os.fsdecode(place)), redirected)
        if full is not None and self._there(full):
            self._removed.add(full)
        self._removed.discard(self._full(target) or "")

    def _borrow(self, place: str, redirected: str) -> None:
        """Make a redirected path show the content of a file, or of a folder's files, which stay in their place."""
        if self._is_folder(place):
            shutil.copytree(place, redirected, copy_function=self._os["symlink"], dirs_exist_ok=True)
        else:
            self._os["symlink"](place, redirected)

    def _point(self, function: Callable[..., None], source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if not self.takes(target):
            is_link = function is self._os["symlink"]
            function(source if is_link else self.at(source), target, *args, **kwargs)
            return
        beside = os.path.join(os.path.dirname(os.path.abspath(os.fsdecode(target))), os.fsdecode(source))
        self._os["symlink"](os.path.abspath(self.at(beside)), self.into(target))

    def _listdir(self, function: Callable[..., list[Any]], path: Any = ".") -> list[Any]:
        names = self._names(path)
        return function(path) if names is None else names

    def _scandir(self, function: Callable[..., Any], path: Any = ".") -> Any:
        names = self._names(path)
        return function(path) if names is None else _Entries(_Entry(os.fspath(path), name) for name in names)

    def _names(self, path: Any) -> list[str] | None:
        """Return the content of a folder as the script sees it; None if that is its real content."""
        full = self._full(path)
        assert full is not None
        self._looked_at.setdefault(full + os.sep, self._there(full))
        redirected = self._root + full
        is_kept, is_gone = self._there(redirected), self._gone(full)
        if isinstance(path, bytes) or not (is_kept or is_gone or full in map(os.path.dirname, self._removed)):
            return None
        if is_gone and not is_kept:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        names = dict.fromkeys(self._os["listdir"](redirected) if is_kept else ())
        if self._is_folder(full):
            names |= {n: None for n in self._os["listdir"](full) if not self._gone(os.path.join(full, n))}
        return list(names)


class _Entry:
    """An entry of `os.scandir`; each query reads the file system."""

    def __init__(self, folder: str, name: str) -> None:
        self.name, self.path = name, os.path.join(folder, name)

    def __fspath__(self) -> str:
        return self.path

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isdir(self.path)

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return os.path.isfile(self.path)

    def is_symlink(self) -> bool:
        return False

    def stat(self, *, follow_symlinks: bool = True) -> os.stat_result:
        return os.stat(self.path)

    def inode(self) -> int:
        return self.stat().st_ino


class _Entries(contextlib.ExitStack):
    """An iterator over entries that can be entered and closed, like that of `os.scandir`."""

    def __init__(self, entries: Iterable[_Entry]) -> None:
        super().__init__()
        self._entries = iter(entries)

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)


def _a_saver_runs() -> bool:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and not _is_saver(frame.f_code.co_name):
        frame = frame.f_back
    return frame is not None


@functools.cache
def _is_saver(name: str) -> bool:
    return _SAVES.fullmatch(name) is not None


_LARGE = 2**20  # elements: values of larger tensors are not stored, as random ones were never drawn
_REBUILD = "_rebuild_without_values"
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


class _Loading:
    """Arguments of a load: tensors may go back to the GPU that they were saved from."""

    back_on_gpu = True


def install_saving(files: SavedFiles) -> None:
    """Make torch and safetensors save into the folder of `files` and load from there, in this process."""
    _install_pickling()
    lost: dict[str, str] = {}  # path of a saved file whose content could not be stored -> the reason

    @replace_in("save", torch)
    def save_kept(save: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save(obj, f, *args, **kwargs)
            return
        note(NOTE)
        place = files.into(f)
        lost.pop(place, None)
        try:
            save(obj, place, *args, **kwargs)
        except Exception as error:  # the script's objects may raise anything
            lost[place] = f"{type(error).__name__}: {error}"

    @replace_in("load", torch)
    def load_kept(load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike):
            place = files.at(f)
            if (why := lost.get(os.fspath(place))) is not None:
                raise RuntimeError(
                    f"{os.fspath(f)} cannot be read back: saving is suppressed while a script is estimated, and this "
                    f"file could not be kept ({why})"
                )
            f = place
        places = map_location.values() if isinstance(map_location, dict) else (map_location,)
        on_gpu = any(names_cuda(place) for place in places)
        with replaced(_Loading, "back_on_gpu", map_location is None):
            content = load(f, "cpu", *args, **kwargs)
        if not on_gpu:
            return content
        return tree_map(lambda value: value.to("cuda") if isinstance(value, Tensor | nn.Module) else value, content)

    @replace_in("load_state_dict", nn.Module)
    def load_states_in_place(load_states: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # A trained parameter cannot be swapped.
        with replaced(torch.__future__, "_swap_module_params_on_conversion", False):
            return load_states(*args, **kwargs)

    _install_torchscript()
    if importlib.util.find_spec("safetensors") is not None:
        _install_safetensors(files)
    if importlib.util.find_spec("tokenizers") is not None:
        _install_tokenizers(files)


def _install_torchscript() -> None:
    """Save a module that was not scripted unchanged, and load it in that state, from memory."""
    modules: dict[str, Any] = {}

    @replace_in("save", torch.jit)
    def save(_save: Callable[..., None], module: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        torch.save(module, f)
        if isinstance(f, str | os.PathLike):
            modules[os.path.abspath(f)] = copy.deepcopy(module)

    @replace_in("load", torch.jit)
    def load_kept(load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and (saved := modules.get(os.path.abspath(f))) is not None:
            module = copy.deepcopy(saved)
            return module if map_location is None else module.to(map_location)
        return load(f, map_location, *args, **kwargs)


def _install_pickling() -> None:
    """Pickle a tensor without values as its shape."""

    def rebuild(
        dtype: torch.dtype, size: tuple[Any, ...], stride: tuple[Any, ...], requires_grad: bool, on_gpu: bool
    ) -> Tensor:
        device = "cuda" if on_gpu and _Loading.back_on_gpu else "cpu"
        tensor = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if device == "cpu" and tensor.numel() < _LARGE:
            tensor.zero_()
        return tensor.requires_grad_(requires_grad)

    @replace_in("__reduce_ex__", Tensor)
    def reduce_to_shape(reduce: Callable[..., Any], tensor: Tensor, protocol: Any) -> Any:
        with torch._C.DisableTorchFunction():
            without_values = tensor.is_meta or (tensor.numel() >= _LARGE and tensor.is_floating_point())
            if type(tensor) is not Tensor or not without_values or tensor.layout is not torch.strided:
                without_values = False
            shape = (tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.requires_grad, tensor.is_meta)
        return (rebuild, shape) if without_values else reduce(tensor, protocol)

    # Under a name in torch, which unpicklers can look up: a script may have packages of the same names as ours.
    rebuild.__module__, rebuild.__name__, rebuild.__qualname__ = "torch._utils", _REBUILD, _REBUILD
    vars(torch._utils)[_REBUILD] = rebuild
    torch.serialization.add_safe_globals([rebuild])


def _install_safetensors(files: SavedFiles) -> None:
    import safetensors
    import safetensors.torch

    @replace_in("save_file", safetensors.torch)
    def save_file(_save: Any, tensors: Mapping[str, Tensor], filename: Any, metadata: Any = None) -> None:
        with open(filename, "wb") as target:  # replaced by `SavedFiles.open`, which keeps files of functions that save
            write_safetensors(tensors, target, metadata)

    @replace_in("save", safetensors.torch)
    def save(_save: Any, tensors: Mapping[str, Tensor], metadata: Any = None) -> bytes:
        target = io.BytesIO()
        size = write_safetensors(tensors, target, metadata)
        return target.getvalue().ljust(size, b"\0")

    @replace_in("safe_open", safetensors, safetensors.torch)
    def safe_open(opened: Callable[..., Any], filename: Any, *args: Any, **kwargs: Any) -> Any:
        return opened(files.at(filename), *args, **kwargs)


def write_safetensors(tensors: Mapping[str, Tensor], target: BinaryIO, metadata: Mapping[str, str] | None) -> int:
    """Write a file in safetensors' format; the values of large tensors, and of tensors on meta, are holes in it.

    Returns:
        The file's size in bytes. A `BytesIO` target ends with the last written value.

    Raises:
        ValueError: A type of tensor that the format does not have.
    """
    with torch._C.DisableTorchFunction():
        header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
        end = 0
        for name, tensor in tensors.items():
            if tensor.dtype not in _CODES:
                raise ValueError(f"safetensors has no {tensor.dtype}")
            begin, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        target.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            if not tensor.is_meta and tensor.numel() < _LARGE:
                target.seek(8 + len(text) + header[name]["data_offsets"][0])
                target.write(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        target.truncate(8 + len(text) + end)
        return 8 + len(text) + end


def _install_tokenizers(files: SavedFiles) -> None:
    import tokenizers
    from tokenizers import models

    @replace_in("save", tokenizers.Tokenizer)
    def save_kept(save: Callable[..., None], tokenizer: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(tokenizer, files.into(path), *args, **kwargs)

    @replace_in("save", models.Model)
    def save_model_kept(
        save: Callable[..., list[Any]], model: Any, folder: Any, *args: Any, **kwargs: Any
    ) -> list[str]:
        folder_of_copy = os.path.dirname(files.into(os.path.join(folder, "vocabulary")))
        return [os.path.join(folder, os.path.basename(path)) for path in save(model, folder_of_copy, *args, **kwargs)]

    read = tokenizers.Tokenizer.from_file
    replace_attribute(tokenizers.Tokenizer, "from_file", staticmethod(lambda path: read(files.at(path))))
