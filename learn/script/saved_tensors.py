"""Checkpoints of a script hold the shapes of tensors that have no values.

Start reading at `install_saving`. A file that is read back gives tensors of the same shapes, on the same device.
"""

from __future__ import annotations

import copy
import importlib.util
import io
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from featurize.operators.replacing import replace_attribute, replaced, stands_for
from learn.script.device_mode import names_cuda
from learn.script.saved_files import NOTE, SavedFiles

_LARGE = 2**20  # elements: values of larger tensors are not kept, as random ones were never drawn
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
    """How a file is loaded: tensors may go back to the GPU that they were on."""

    back_on_gpu = True


def install_saving(files: SavedFiles, note: Callable[[str], None]) -> None:
    """Have torch and safetensors save into the folder of `files` and load from there, in this process.

    Args:
        files: Where saved files are kept.
        note: Called with a sentence for what was done instead of saving.
    """
    _install_pickling()
    lost: dict[str, str] = {}  # where a file is kept whose content could not be -> why

    @stands_for("save", torch)
    def save_kept(save: Callable[..., None], obj: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(f, str | os.PathLike):
            save(obj, f, *args, **kwargs)
            return
        note(NOTE)
        place = files.into(f)
        lost.pop(place, None)
        try:
            save(obj, place, *args, **kwargs)
        except Exception as error:  # of whatever the script saves
            lost[place] = f"{type(error).__name__}: {error}"

    @stands_for("load", torch)
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

    @stands_for("load_state_dict", nn.Module)
    def load_states_in_place(load_states: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with replaced(torch.__future__, "_swap_module_params_on_conversion", False):  # trained, it cannot be swapped
            return load_states(*args, **kwargs)

    _install_torchscript()
    if importlib.util.find_spec("safetensors") is not None:
        _install_safetensors(files, note)
    if importlib.util.find_spec("tokenizers") is not None:
        _install_tokenizers(files)


def _install_torchscript() -> None:
    """Save a module that was not scripted as it is, and load it as it was then, from memory."""
    modules: dict[str, Any] = {}

    @stands_for("save", torch.jit)
    def save(_save: Callable[..., None], module: Any, f: Any, *args: Any, **kwargs: Any) -> None:
        torch.save(module, f)
        if isinstance(f, str | os.PathLike):
            modules[os.path.abspath(f)] = copy.deepcopy(module)

    @stands_for("load", torch.jit)
    def load_kept(load: Callable[..., Any], f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(f, str | os.PathLike) and (kept := modules.get(os.path.abspath(f))) is not None:
            module = copy.deepcopy(kept)
            return module if map_location is None else module.to(map_location)
        return load(f, map_location, *args, **kwargs)


def _install_pickling() -> None:
    """Pickle a tensor without values as its shape."""

    def rebuild(dtype: torch.dtype, size: tuple, stride: tuple, requires_grad: bool, on_gpu: bool) -> Tensor:
        device = "cuda" if on_gpu and _Loading.back_on_gpu else "cpu"
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        if device == "cpu" and made.numel() < _LARGE:
            made.zero_()
        return made.requires_grad_(requires_grad)

    @stands_for("__reduce_ex__", Tensor)
    def reduce_to_shape(reduce: Callable[..., Any], tensor: Tensor, protocol: Any) -> Any:
        with torch._C.DisableTorchFunction():
            without_values = tensor.is_meta or (tensor.numel() >= _LARGE and tensor.is_floating_point())
            if type(tensor) is not Tensor or not without_values or tensor.layout is not torch.strided:
                without_values = False
            shape = (tensor.dtype, tuple(tensor.size()), tuple(tensor.stride()), tensor.requires_grad, tensor.is_meta)
        return (rebuild, shape) if without_values else reduce(tensor, protocol)

    # By a name of torch's, which unpicklers look up: a script may have packages that are called as ours.
    rebuild.__module__, rebuild.__name__, rebuild.__qualname__ = "torch._utils", _REBUILD, _REBUILD
    vars(torch._utils)[_REBUILD] = rebuild
    torch.serialization.add_safe_globals([rebuild])


def _install_safetensors(files: SavedFiles, note: Callable[[str], None]) -> None:
    import safetensors
    import safetensors.torch

    @stands_for("save_file", safetensors.torch)
    def save_file(_save: Any, tensors: Mapping[str, Tensor], filename: Any, metadata: Any = None) -> None:
        note(NOTE)
        with open(files.into(filename), "wb") as target:
            write_safetensors(tensors, target, metadata)

    @stands_for("save", safetensors.torch)
    def save(_save: Any, tensors: Mapping[str, Tensor], metadata: Any = None) -> bytes:
        target = io.BytesIO()
        size = write_safetensors(tensors, target, metadata)
        return target.getvalue().ljust(size, b"\0")

    @stands_for("safe_open", safetensors, safetensors.torch)
    def safe_open(opened: Callable[..., Any], filename: Any, *args: Any, **kwargs: Any) -> Any:
        return opened(files.at(filename), *args, **kwargs)


def write_safetensors(tensors: Mapping[str, Tensor], target: BinaryIO, metadata: Mapping[str, str] | None) -> int:
    """Write a file of safetensors' format; the values of large tensors, and of those on meta, are holes in it.

    Returns:
        The file's size in bytes. Memory that is written to ends with the last value.

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

    @stands_for("save", tokenizers.Tokenizer)
    def save_kept(save: Callable[..., None], tokenizer: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        save(tokenizer, files.into(path), *args, **kwargs)

    @stands_for("save", models.Model)
    def save_model_kept(save: Callable[..., list], model: Any, folder: Any, *args: Any, **kwargs: Any) -> list[str]:
        kept = os.path.dirname(files.into(os.path.join(folder, "vocabulary")))
        return [os.path.join(folder, os.path.basename(path)) for path in save(model, kept, *args, **kwargs)]

    read = tokenizers.Tokenizer.from_file
    replace_attribute(tokenizers.Tokenizer, "from_file", staticmethod(lambda path: read(files.at(path))))
