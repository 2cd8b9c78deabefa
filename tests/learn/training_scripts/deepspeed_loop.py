"""A loop as DeepSpeed's tutorials have it, for its launcher or torchrun: initialize, backward, step."""

import argparse

import deepspeed
import torch
from torch import nn

WIDTH, LAYERS, CLASSES, BATCH = 1024, 6, 64, 16


def make_model():
    blocks = [part for _ in range(LAYERS) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, CLASSES))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--fused", action="store_true")
    parser = deepspeed.add_config_arguments(parser)
    args = parser.parse_args()
    deepspeed.init_distributed()
    with deepspeed.zero.Init(config_dict_or_path=args.deepspeed_config):
        model = make_model()
    optimizer = None
    if args.fused:
        from deepspeed.ops.adam import FusedAdam

        optimizer = FusedAdam(model.parameters(), lr=1e-4)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), optimizer=optimizer)
    dtype = next(engine.parameters()).dtype
    for step in range(100):
        x = torch.randn(BATCH, WIDTH).to(engine.device)
        y = torch.randint(0, CLASSES, (BATCH,)).to(engine.device)
        given = x.to(dtype)
        output = engine(given)
        loss = nn.functional.cross_entropy(output, y)
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary():
            engine.save_checkpoint("checkpoints", tag=step)


if __name__ == "__main__":
    main()
