"""Models built without their memory: moves to a GPU are left out, and lazy parameters get their shape."""

import pytest
import torch
from torch import nn

from featurize.recording.skeleton import build_on_meta, empty_copy


def all_meta(model):
    return all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


def test_moves_to_a_gpu_are_left_out():
    def make():
        model = nn.Sequential(nn.Linear(4, 4, device="cuda"), nn.Linear(4, 4).cuda())
        return model.to("cuda", torch.float16).to(device=torch.device("cuda", 0))

    model = build_on_meta(make)
    assert all_meta(model) and {p.dtype for p in model.parameters()} == {torch.float16}


class OwnState(nn.Linear):
    def __getstate__(self):
        return vars(self), "more"

    def __setstate__(self, state):
        super().__setstate__(state[0])


class OwnArguments(nn.Linear):
    def __new__(cls, width, height):
        return super().__new__(cls)

    def __getnewargs__(self):
        return self.in_features, self.out_features


@pytest.mark.parametrize("kind", [OwnState, OwnArguments])
def test_modules_that_pickle_knows_how_to_copy_are_copied(kind):
    copied = empty_copy(nn.Sequential(kind(4, 3)))
    assert all_meta(copied) and type(copied[0]) is kind and copied[0].weight.shape == (3, 4)


@pytest.mark.parametrize("made", [empty_copy, lambda model: build_on_meta(lambda: model)])
def test_lazy_parameters_get_their_shape_on_meta(made):
    mine = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3))
    copied = made(mine)
    assert copied(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 3)
    assert all_meta(copied) and copied[3].weight.shape == (3, 144)
    assert all(nn.parameter.is_lazy(p) for p in mine[0].parameters()) and mine[0].weight.device.type == "cpu"
