"""Names of code in configs, and the rules by which they may be imported: the user's own, models of known libraries.

Start reading at `CodeName` and `TrustedName`, then `require_model`. Torch-free until a model is inspected.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from conf.cli.settings import key
from conf.errors import UsageError, shown

# Modules of libraries whose models data may name. A factory is a plain name in them, without further attributes.
LIBRARY_MODULES = {
    "torchvision": re.compile(r"torchvision\.models(\.\w+){0,2}"),
    "timm": re.compile(r"timm(\.models(\.\w+)?)?"),
    "transformers": re.compile(r"transformers(\.models\.\w+(\.modeling_\w+)?)?"),
}
_TIMM_INSIDE = ("transformers.models.timm_wrapper", "transformers.models.timm_backbone")  # accept any timm model
_WEIGHTS = ("weights", "weights_backbone", "pretrained", "pretrained_backbone", "use_pretrained_backbone")
_LONGEST_KEY = 200  # characters; the pattern search of longer keys is slow
# Keys whose values libraries look up in their own tables: activations, norms, kinds of pooling and of tasks.
_WORD_KEY = re.compile(r"act|\w*_act|\w*(act_|activation|norm|pool|_type)\w*|model_name|dtype|attn_implementation")
_NO_WORD = re.compile(r"path|file|dir(_|$)|url|repo|checkpoint|cfg|config|class|module|kernel|experts")
_FETCHING = re.compile(r"pretrain|remote|trust|(^|_)hub(_|$)")
_WORD = re.compile(r"[A-Za-z]\w{0,63}")
_WORDS = {
    "dtype": re.compile(r"float32|float16|bfloat16|float64"),
    "attn_implementation": re.compile(r"eager|sdpa"),  # other values fetch kernels
    "model_name": re.compile(r"[A-Za-z]\w{0,99}(\.\w{1,99})?"),  # timm's, looked up in its registry
}
# Mappings in configurations of transformers: the configurations of a model's parts.
_NESTED = re.compile(r"(text|vision|audio|encoder|decoder)_config")
_REPEATED = re.compile(r"layer|depth|block|stage|repeat|level")  # keys that count repeated parts
MOST_REPEATS = 1000
MOST_CHARACTERS = 20_000
_MODULE_NAME = re.compile(r"[A-Za-z_]\w*(\.\w+)*")


class NotTrusted(UsageError):
    """A config from data names code that was not allowed to run."""


class CodeName(str):
    """`MODULE:FACTORY` that the user of this process gave: it may be imported and called, whatever it names.

    The type is the permission. It survives copies, `dataclasses.replace` and pickling between processes of one command.
    JSON and Parquet hold plain text, so a name read from a file has lost it.
    """

    __slots__ = ()


class TrustedName(str):
    """`MODULE:FACTORY` from data, in a module that the user trusts. The module is imported; only its own classes of
    `nn.Module`, and functions that it defines itself, are called."""

    __slots__ = ()


def parse_trust(value: object) -> tuple[str, ...]:
    """Return the modules of a `trust=` option: a name, or several. Raises `UsageError` for a value that is not a
    module's name."""
    given = () if value is None else (value,) if isinstance(value, str) else value
    names = tuple(given) if isinstance(given, Sequence) else (given,)
    wrong = [name for name in names if not isinstance(name, str) or not _MODULE_NAME.fullmatch(name)]
    if wrong:
        raise UsageError(f"trust must name modules, as in trust=[mypackage.nets], got {shown(wrong[0])}")
    return names


_ROWS_TRUST = "modules whose code may run where a row names it, as in [mypackage]; default none, see docs/learning.md"


def trust_key(help: str = _ROWS_TRUST) -> Any:
    """Return the field `trust` of commands that read names of code from data."""
    return key(None, help, "text | list of text | null", build=parse_trust)


def granted_model(model: str, trust: Sequence[str]) -> str:
    """Return a model's name from data, marked as trusted if it lies in one of the modules `trust`, and as the user's if
    `trust` lists it as `MODULE:FACTORY`."""
    module, colon, _ = model.partition(":")
    if isinstance(model, CodeName):
        return model
    if colon and model in trust:
        return CodeName(model)
    return (
        TrustedName(model) if any(module == trusted or module.startswith(f"{trusted}.") for trusted in trust) else model
    )


def library_problem(model: str, arguments: str, *, advice: str | None = None) -> str | None:
    """Return why data may not name this model with these arguments (a JSON object), judged by their texts, or None.

    `advice`: the way to allow a third-party module; default: the one for a command line.
    """
    if isinstance(model, CodeName):
        return None
    module, _, factory = model.partition(":")
    package = module.partition(".")[0]
    if isinstance(model, TrustedName):
        if "." in factory:
            return f"{model} leads out of the trusted {module}: name what the module itself defines, as in {module}:Net"
        return None
    if package not in LIBRARY_MODULES:
        advice = advice or f"pass trust=[{module}] to allow it, or type the config on the command line"
        return f"{model} comes from stored data, so it is not imported; {advice}"
    if not LIBRARY_MODULES[package].fullmatch(module) or "." in factory or factory.startswith("_"):
        written = f"; write {package}.models:{factory}" if package == module == "torchvision" else ""
        return f"{model} is not one of {package}'s models, and data may name no other code{written}"
    return arguments_problem(model, arguments)


def arguments_problem(model: str, arguments: str) -> str | None:
    """Return why these arguments are more than plain data: numbers, words for a few known keys, and lists of them."""
    if len(arguments) > MOST_CHARACTERS:
        return f"{model}: arguments of {len(arguments):,} characters are too long for data"
    given = json.loads(arguments)
    for name, value in given.items():
        problem = _value_problem(name, value, 0)
        if problem is not None:
            return f"{model}: data may not give the argument {shown(name)}: {problem}"
    return None


def require_model(model: str, factory: Any, arguments: str) -> None:
    """Raise `NotTrusted` unless the user named the model, a module that the user trusts defines the imported `factory`,
    or it is a library's model with plain data. Importers of a config's names call this before the first call."""
    if isinstance(model, CodeName):
        return
    problem = library_problem(model, arguments)
    if problem is None and isinstance(model, TrustedName):
        problem = _foreign_problem(model, factory)
        if problem is None:
            return
        if model.partition(":")[0].partition(".")[0] in LIBRARY_MODULES:
            problem = library_problem(str(model), arguments)
    if problem is None and not _is_a_model(model, factory):
        problem = f"{model} is not one of the library's models, and data may name no other code"
    if problem is None:
        problem = _download(model, factory, json.loads(arguments))
    if problem is not None:
        raise NotTrusted(f"zoo: {problem}")


def require_settings(model: str, settings: Any) -> None:
    """Raise `NotTrusted` where a transformers model's configuration would fetch weights by itself."""
    if not isinstance(model, CodeName | TrustedName) and _fetches(settings, 0):
        raise NotTrusted(f"zoo: {model} would fetch pretrained weights, which data may not ask for")


def _foreign_problem(model: str, factory: Any) -> str | None:
    """Return why `factory`, an attribute of the trusted module, is not called; None if the module itself defines it."""
    from torch import nn

    module = model.partition(":")[0]
    if not isinstance(factory, FunctionType) and not (isinstance(factory, type) and issubclass(factory, nn.Module)):
        return f"{model} is {type(factory).__name__}, neither a class of nn.Module nor a function that {module} defines"
    home = factory.__module__
    if home != module:
        return f"{model} is defined in {home}; name it as {home}:{factory.__name__}, and trust that module"
    return None


def _value_problem(name: str, value: Any, depth: int) -> str | None:
    if value is None or value is False:
        return None
    if name.startswith("_"):
        return "it is the library's own"
    if name in _WEIGHTS or _FETCHING.search(name):
        return "it fetches weights"
    if value is True:
        return None
    if isinstance(value, int | float):
        if not abs(value) < 2**31:
            return "a number beyond 2**31"
        if _REPEATED.search(name) and value > MOST_REPEATS and isinstance(value, int) and "size" not in name:
            return f"more than {MOST_REPEATS} of them"
        return None
    if isinstance(value, list) and depth < 3:
        return next((problem for item in value if (problem := _value_problem(name, item, depth + 1))), None)
    if isinstance(value, str):
        if (
            len(name) <= _LONGEST_KEY
            and _WORD_KEY.fullmatch(name)
            and not _NO_WORD.search(name)
            and _WORDS.get(name, _WORD).fullmatch(value)
        ):
            return None
        return f"a text ({shown(value)})"
    if isinstance(value, dict) and depth < 3 and _NESTED.fullmatch(name):
        parts = (_value_problem(inner, item, depth + 1) for inner, item in value.items())
        return next((problem for problem in parts if problem), None)
    return "a mapping"


def _is_a_model(model: str, factory: Any) -> bool:
    """Return whether the library lists it as a model: in its registry, or as a class of its models' files."""
    from torch import nn

    module, _, name = model.partition(":")
    package = module.partition(".")[0]
    home = f"{package}.models."
    own_class = isinstance(factory, type) and issubclass(factory, nn.Module) and factory.__module__.startswith(home)
    if package == "timm":
        import timm

        if factory is timm.create_model:
            return True
        return own_class or (timm.is_model(name) and timm.models.model_entrypoint(name) is factory)
    if package == "torchvision":
        from torchvision.models import list_models
        from torchvision.models._api import BUILTIN_MODELS

        return own_class or (name in list_models() and factory in BUILTIN_MODELS.values())
    settings = getattr(factory, "config_class", None)
    return own_class and isinstance(settings, type) and not factory.__module__.startswith(_TIMM_INSIDE)


def _download(model: str, factory: Any, given: Mapping[str, Any]) -> str | None:
    """Return why the call would fetch weights by a default of the library, or does not name one of timm's models."""
    import importlib

    if "model_name" in given:
        timm = importlib.import_module("timm")
        if factory is timm.create_model and not timm.is_model(given["model_name"].partition(".")[0]):
            return f"{model}: timm has no model {shown(given['model_name'])}"
    try:
        parameters = inspect.signature(factory).parameters
    except (TypeError, ValueError):
        return f"{model} does not say which arguments it takes"
    for name in _WEIGHTS:
        default = parameters[name].default if name in parameters else None
        if name not in given and default not in (None, False, inspect.Parameter.empty):
            return f"{model} fetches weights unless its arguments say {{{name}: null}}"
    return None


def _fetches(settings: Any, depth: int) -> bool:
    attributes = vars(settings) if hasattr(settings, "__dict__") else {}
    if attributes.get("use_pretrained_backbone"):
        return True
    nested = (value for value in attributes.values() if hasattr(value, "model_type"))
    return depth < 3 and any(_fetches(value, depth + 1) for value in nested)
