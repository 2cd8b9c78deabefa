"""Train a small net on real ranks of DeepSpeed, and write down what each holds and sends: deepspeed_runs.json.

Not a test: it wants DeepSpeed, which runs on the CPU, too, over gloo.

    cd tests/featurize/asking_deepspeed
    DS_ACCELERATOR=cpu python ask_deepspeed.py deepspeed_runs.json [CASE...]
"""

import gc
import json
import logging
import os
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import rank_watch
from deepspeed_nets import BATCH, CASES, NETS, batch_of

from featurize.recording.values import tensors_of

KINDS = rank_watch.SENT | {
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "c10d::reduce_": "reduce",
}
SMALL = 64  # bytes of norms and flags, which are left out


class Watch(rank_watch.Watch):
    """Counts the bytes of storages that are alive, and notes what is sent."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if name.startswith("c10d::"):
            nbytes = max(sum(t.nbytes for t in tensors_of(one)) for one in args[:2])
            if name in KINDS and nbytes > SMALL:
                self.sent.append([KINDS[name], nbytes])
            with _disable_current_modes():  # what gloo takes is gloo's own
                return rank_watch.sent_as_copies(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        for one in tensors_of(out):
            if not one.is_meta:
                self.hold(one)
        return out


def train(case):
    import deepspeed

    torch.manual_seed(0)
    config, again = case["config"], case.get("again", False)
    dtype = torch.bfloat16 if config.get("bf16", {}).get("enabled") else torch.float32
    model = NETS[case["net"]](again).to(dtype)
    watch = Watch()
    for tensor in model.parameters():
        watch.hold(tensor.detach())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9, foreach=True)
    x = batch_of(case, "cpu")
    watch.hold(x)
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **config,
    }
    steps = []
    with watch:
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        del optimizer
        for _ in range(4):
            watch.sent, watch.peak = [], watch.bytes
            for _ in range(config.get("gradient_accumulation_steps", 1)):
                loss = rank_watch.loss_of(engine(x), None)
                engine.backward(loss)
                del loss
                engine.step()
            steps.append({"peak": watch.peak, "end": watch.bytes, "sent": watch.sent})
    engine.destroy()
    return steps[-1]


def one_rank(rank, ranks, names, folder):
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29544"}
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    figures = {}
    for name in names:
        gc.collect()
        figures[name] = train(CASES[name])
        Path(folder, str(rank)).write_text(json.dumps(figures))
    torch.distributed.destroy_process_group()


def main():
    import deepspeed

    target, *names = sys.argv[1:]
    file = Path(target)
    content = json.loads(file.read_text()) if file.exists() else {"runs": {}}
    chosen = names or list(CASES)
    for ranks in sorted({CASES[name]["ranks"] for name in chosen}):
        of_size = [name for name in chosen if CASES[name]["ranks"] == ranks]
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(one_rank, (ranks, of_size, folder), nprocs=ranks)
            figures = [json.loads(Path(folder, str(rank)).read_text()) for rank in range(ranks)]
        for name in of_size:
            content["runs"][name] = [one[name] for one in figures]
    content |= {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(runs)}" for name, runs in content.pop("runs").items())
    about = json.dumps(content, sort_keys=True).removesuffix("}")
    file.write_text(f'{about}, "runs": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
