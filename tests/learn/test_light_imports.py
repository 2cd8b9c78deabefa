"""The imports of an estimate, and `from learn import ...`: those left out come as soon as somebody needs them."""

import importlib
import os
import subprocess
import sys
import typing

import pytest

import learn
from learn import estimate_script
from tests.learn.test_script_failures import LOOP

CONFIG = "config={family: mlp, batch_size: 8, input_size: 64, classes: 10, depth: 2}"


def run(code, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "GPUFARM_DATA": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


LEFT_OUT = f"""
import importlib, runpy, sys
import learn
from learn import estimate
import learn.commands.fit, learn.fitting.artifacts, learn.judging.report
import featurize.device.device_spec as devices
from featurize.families import family_names, timm, zoo
from featurize.configs.features import group_key

def print_imported(*names):
    print("imported:", [name for name in names if name in sys.modules])

for name in family_names():
    importlib.import_module(f"featurize.families.{{name}}")
devices.load_device(devices.device_names()[0])
assert group_key(timm.Config(model="a", batch_size=1)) and callable(estimate)
assert group_key(zoo.Config(model="x:a", inputs="float32[3]", batch_size=1))
mlp = {{"family": "mlp", "batch_size": 8, "input_size": 64, "classes": 10, "depth": 2}}
assert estimate(mlp, method="fast").peak_memory_mib > 0
print_imported("torch", "timm", "transformers", "x", "lightgbm", "sklearn", "matplotlib")
print_imported(*[name for name in sys.modules if name.startswith("learn.script")])

import numpy as np
from learn.fitting.artifacts import default_artifact
from learn.estimators.trees import Trees
Trees.load(default_artifact("memory").path / "model", "scale").predict(np.zeros((3, 99)))
print_imported("lightgbm", "sklearn")

sys.argv = ["estimate", {CONFIG!r}, "format=json"]
try:
    runpy.run_module("learn.estimate", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code
print_imported("lightgbm", "sklearn", "pandas", "scipy", "matplotlib", "duckdb", "ray", "torch_geometric",
               "torch._dynamo.convert_frame", "torch._inductor")
print_imported("torch")
"""


def test_what_needs_no_model_imports_no_torch_and_an_estimate_on_the_command_line_no_compiler(tmp_path):
    imported = [line for line in run(LEFT_OUT, tmp_path).splitlines() if line.startswith("imported: ")]
    assert imported == ["imported: []"] * 4 + ["imported: ['torch']"]


USES = [
    "from torch._dynamo.utils import is_compile_supported, counters; import torch._dynamo as d; assert d.config",
    "import torch._dynamo as d; assert d.utils.counters is not None and not d.utils.is_compile_supported('meta')",
    "from torch._dynamo import config; assert config.cache_size_limit",
    "import torch._dynamo.eval_frame; import torch._dynamo as d; assert d.eval_frame.OptimizedModule",
    "import torch._dynamo as d; assert d.is_compiling() is False and d.optimize and not d.is_compiling()",
    "assert torch.compile(lambda x: x + 1, backend='eager')(torch.ones(2)).tolist() == [2, 2]",
]


@pytest.mark.slow
def test_what_was_left_out_comes_when_it_is_needed(tmp_path):
    code = f"""
import os
import torch
from featurize.trace.light_imports import _StandIn, without_compiler
without_compiler()
model = torch.nn.Linear(2, 2, device="meta")
torch.optim.Adam(model.parameters(), foreach=True).step()
torch.ones(2, device="meta") + 1
assert "torch._dynamo.convert_frame" not in __import__("sys").modules
for use in {USES!r}:
    child = os.fork()
    if not child:
        code = 1
        try:
            exec(use)
            model(torch.ones(3, 2, device="meta")).sum().backward()
            torch.optim.Adam(model.parameters(), foreach=True).step()
            code = 0
        except BaseException:
            __import__("traceback").print_exc()
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0, use
print("done")
"""
    assert run(code, tmp_path) == "done\n"


# -- the front door: functions, whatever was imported before


@pytest.mark.parametrize("name", ["estimate", "fit"])
def test_importing_the_command_module_is_refused_and_leaves_the_function_in_place(name):
    function = getattr(learn, name)
    with pytest.raises(ImportError, match=f"from learn import {name}"):
        importlib.import_module(f"learn.{name}")
    assert getattr(learn, name) is function
    namespace: dict[str, typing.Any] = {}
    exec(f"from learn import {name}", namespace)
    assert namespace[name] is function


def test_a_script_that_compiles_nothing_brings_no_compiler(tmp_path):
    """In a new process, as a user's: those of most tests are copies of one that is prepared."""
    (tmp_path / "train.py").write_text(f"import sys\nassert 'torch._dynamo.convert_frame' not in sys.modules{LOOP}")
    assert estimate_script(["python", str(tmp_path / "train.py")]).peak_memory_mib > 0
