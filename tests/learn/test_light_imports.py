"""The imports of an estimate; those left out come as soon as somebody needs them."""

import importlib
import os
import subprocess
import sys

import pytest

from featurize.trace.light_imports import _StandIn, without_compiler
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


def test_what_needs_no_model_imports_neither_torch_nor_a_library_of_models(tmp_path):
    code = """
import importlib, sys
import learn
from learn import estimate
import learn.commands.fit, learn.fitting.artifacts, learn.judging.report
import featurize.device.device_spec as devices
from featurize.families import family_names, timm, zoo
from featurize.configs.features import group_key

for name in family_names():
    importlib.import_module(f"featurize.families.{name}")
devices.load_device(devices.device_names()[0])
assert group_key(timm.Config(model="a", batch_size=1)) and callable(estimate)
assert group_key(zoo.Config(model="x:a", inputs="float32[3]", batch_size=1))
heavy = {"torch", "timm", "transformers", "x", "lightgbm", "sklearn", "matplotlib"} & set(sys.modules)
print(sorted(heavy) + [name for name in sys.modules if name.startswith("learn.script")])

import numpy as np
from learn.fitting.artifacts import default_artifact
from learn.estimators.trees import Trees
Trees.load(default_artifact("memory").path / "model", "scale").predict(np.zeros((3, 99)))
print(sorted({"lightgbm", "sklearn"} & set(sys.modules)))
"""
    assert run(code, tmp_path).split() == ["[]", "[]"]


def test_an_estimate_on_the_command_line_and_simulated_trials_need_no_compiler(tmp_path):
    printed = run(
        f"""
import dataclasses, json, runpy, sys
sys.argv = ["estimate", {CONFIG!r}, "format=json"]
try:
    runpy.run_module("learn.estimate", run_name="__main__", alter_sys=True)
except SystemExit as ended:
    assert not ended.code
heavy = ["lightgbm", "sklearn", "pandas", "scipy", "matplotlib", "duckdb", "ray", "torch_geometric",
         "torch._dynamo.convert_frame", "torch._inductor"]
print("\\n" + json.dumps([name for name in heavy if name in sys.modules]))

from featurize.training.training_step import preload
preload()
from featurize.configs.draws import sample_range
from featurize.configs.dimensions import default_space
from featurize.configs.space import parse_space
from featurize.trace.tracer import trace_config
for family in ("cnn", "gpt"):
    (config,) = sample_range(parse_space(family, default_space(family)), 0, 0, 1)
    config = dataclasses.replace(config, activation_checkpointing=False, optimizer="adamw", precision="bf16")
    trace_config(config, device="A100-SXM4-40GB")
print(json.dumps([name for name in ("torch._dynamo.convert_frame", "torch.distributed.tensor") if name in sys.modules]))
""",
        tmp_path,
    )
    assert printed.splitlines()[-2:] == ["[]", "[]"]


def test_a_script_that_compiles_nothing_brings_no_compiler(tmp_path):
    (tmp_path / "train.py").write_text(f"import sys\nassert 'torch._dynamo.convert_frame' not in sys.modules{LOOP}")
    assert estimate_script(["python", str(tmp_path / "train.py")]).peak_memory_mib > 0


def test_the_first_trace_of_a_process_holds_no_more_than_the_next_where_checkpoints_bring_the_compiler(tmp_path):
    run(
        """
from featurize.families import loss_of, transformer
from featurize.trace.tracer import trace_step

config = transformer.Config(
    batch_size=2, activation_checkpointing=True, vocabulary_size=50, sequence_length=16, embedding_size=32, heads=2,
    depth=2, feed_forward=32, classes=3, topology="hybrid",
)
first, second = (
    trace_step(lambda: transformer.build(config), lambda on: transformer.batch(config, on), loss=loss_of(config),
               settings=config)
    for _ in range(2)
)
assert first.events == second.events
""",
        tmp_path,
    )


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


def test_it_leaves_alone_what_is_imported_already():
    compiler = importlib.import_module("torch._dynamo")
    assert not isinstance(compiler, _StandIn), "an earlier test has left a stand-in"
    without_compiler()
    assert sys.modules["torch._dynamo"] is compiler
