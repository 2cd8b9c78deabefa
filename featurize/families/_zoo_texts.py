"""Parser of the texts of a `zoo` config: the tensors of a sample, and a factory's arguments.

Start reading at `Tensors` and `parse_tensors`; torch is imported when a tensor is made.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from conf.files.identity import canonical_json

if TYPE_CHECKING:
    import torch

FLOATS = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32")
DTYPES = (*FLOATS, *INTEGERS, "bool")
_TENSOR = re.compile(rf"(?:([A-Za-z_]\w*)=)?({'|'.join(DTYPES)})\[([\d, ]*)\](?:<(\d+)|=(\d+))?(?:[\s,;]+|$)")


class Tensors(NamedTuple):
    """One input, or the target: `shape` is a sample's. `bound`: integers are 0 <= x < bound. `value`: all are this one.
    `name`: of a keyword."""

    dtype: str
    shape: tuple[int, ...]
    bound: int | None = None
    value: int | None = None
    name: str | None = None

    def __str__(self) -> str:
        name = f"{self.name}=" if self.name else ""
        values = f"<{self.bound}" if self.bound is not None else "" if self.value is None else f"={self.value}"
        return f"{name}{self.dtype}[{','.join(map(str, self.shape))}]{values}"

    def make(self, samples: int, device: str | torch.device) -> torch.Tensor:
        """[samples, *shape]: normal floats, uniform integers below the bound, or the value."""
        import torch

        shape, dtype = (samples, *self.shape), getattr(torch, self.dtype)
        if self.value is not None:
            return torch.full(shape, self.value, dtype=dtype, device=device)
        if self.dtype in FLOATS:
            return torch.randn(shape, dtype=dtype, device=device)
        return torch.randint(2 if self.bound is None else self.bound, shape, dtype=dtype, device=device)


def parse_tensors(text: str) -> tuple[Tensors, ...]:
    """The tensors of a text that `tensor_problems` finds nothing wrong with."""
    return tuple(_tensor(match) for match in _TENSOR.finditer(text))


def _tensor(match: re.Match) -> Tensors:
    name, dtype, shape, bound, value = match.groups()
    sizes = tuple(int(size) for size in shape.split(",") if size.strip())
    return Tensors(dtype, sizes, None if bound is None else int(bound), None if value is None else int(value), name)


def canonical_tensors(text: Any) -> Any:
    """The same tensors in one spelling; what cannot be read as it is."""
    if not isinstance(text, str) or _unread(text):
        return text
    return " ".join(map(str, parse_tensors(text)))


def _unread(text: str) -> str:
    """Return the part of the text that is not a list of tensors."""
    at = 0
    while at < len(text.rstrip()):
        match = _TENSOR.match(text, at)
        if match is None:
            return text[at:]
        at = match.end()
    return ""


def tensor_problems(text: Any, single: bool) -> list[str]:
    """Return the problems of an `inputs`, or of a `target`, which is one tensor without a name."""
    if not isinstance(text, str) or _unread(text):
        unread = text if not isinstance(text, str) else _unread(text)
        return [
            "must be tensors such as float32[3,224,224] or int64[128]<50257, separated by spaces; "
            f"dtypes are {', '.join(DTYPES)}, got {unread!r}"
        ]
    tensors, problems = parse_tensors(text), []
    if not tensors or (single and len(tensors) > 1):
        problems.append(f"must be {'one tensor' if single else 'at least one tensor'}, got {text!r}")
    for tensor in tensors:
        if 0 in tensor.shape:
            problems.append(f"must have sizes >= 1, got {tensor}")
        if tensor.dtype in INTEGERS and tensor.value is None and not tensor.bound:
            problems.append(f"must say what integers lie below, as in {tensor.dtype}[128]<50257, got {tensor}")
        if tensor.dtype not in INTEGERS and tensor.bound is not None:
            problems.append(f"must have bounds on integers only, got {tensor}")
    names = [tensor.name for tensor in tensors if tensor.name is not None]
    if single and names:
        problems.append(f"must have no name, got {text!r}")
    elif len(set(names)) < len(names) or any(one.name is None for one in tensors[len(tensors) - len(names) :]):
        problems.append(f"must have each name once, and names only after what has none, got {text!r}")
    return problems


def canonical_arguments(value: Any) -> Any:
    """The same arguments as canonical JSON; what is no mapping as it is."""
    arguments = parse_arguments({} if value is None else value)
    try:
        return value if arguments is None else canonical_json(arguments)
    except (TypeError, ValueError):  # holds what JSON has no word for
        return value


def parse_arguments(value: Any) -> dict[str, Any] | None:
    """The mapping that the text or mapping holds; None where it holds none."""
    arguments = value
    if isinstance(value, str):
        try:
            arguments = json.loads(value)
        except ValueError:
            arguments = _yaml(value)
    return arguments if isinstance(arguments, dict) and all(isinstance(key, str) for key in arguments) else None


def _yaml(text: str) -> Any:
    """`{n_layer: 4}`: JSON whose quotes a shell has eaten. Nothing at all is no arguments."""
    if not text.strip().startswith("{"):  # YAML would take a bare word for a mapping
        return None if text.strip() else {}
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        return OmegaConf.to_container(OmegaConf.create(text), resolve=False)
    except (YAMLError, OmegaConfBaseException):
        return None
