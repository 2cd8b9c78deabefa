"""Models built without their memory: what constructors compute is real, what the model holds is not."""

import subprocess
import sys
import threading

import pytest
import torch
from torch import nn

from featurize.recording.skeleton import build_on_meta, on_meta


def all_meta(model):
    return all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))


class ReadsBack(nn.Module):
    """Does what published constructors do: drop-path rates, index tables, initialisation by value."""

    def __init__(self, width=8, depth=3):
        super().__init__()
        rates = torch.linspace(0, 0.1, depth)
        self.blocks = nn.ModuleList(nn.Dropout(rate) for rate in rates.tolist())
        self.last_rate = rates[-1].item()
        coordinates = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        distance = (coordinates[:, :, None] - coordinates[:, None, :]).sum(0)
        distance -= distance.min()
        self.register_buffer("index", distance, persistent=False)
        self.table = nn.Parameter(torch.zeros(int(self.index.max()) + 1, 2))
        self.names = [f"{int(n)}" for n in torch.unique(self.index)]
        self.linear = nn.Linear(width, width)
        nn.init.trunc_normal_(self.linear.weight, std=0.02)
        self.linear.bias.data.copy_(torch.arange(width))
        self.linear.weight.data.mul_(torch.ones(width))
        self.linear.weight.data[0] = torch.randn(width)
        self.biased = self.table[self.index.view(-1)].shape

    def forward(self, x):
        return self.linear(x) + self.table[self.index.view(-1)].sum()


def test_parameters_and_buffers_are_on_meta_and_what_the_constructor_read_back_is_true():
    model = build_on_meta(ReadsBack)
    assert all_meta(model)
    assert model.last_rate == pytest.approx(0.1) and [b.p for b in model.blocks][1] == pytest.approx(0.05)
    assert model.table.shape == (13, 2) and model.names == [str(n) for n in range(13)] and model.biased == (256, 2)
    assert model(torch.empty(2, 8, device="meta")).shape == (2, 8)
    with torch.device("meta"):  # a default device of the caller changes nothing
        model = build_on_meta(ReadsBack)
    assert all_meta(model) and model.last_rate == pytest.approx(0.1)


def test_shapes_dtypes_flags_and_names_are_those_of_the_real_model():
    def make():
        model = nn.Sequential(nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last), nn.BatchNorm2d(8), nn.Flatten())
        model[0].weight.requires_grad_(False)
        return model.to(torch.bfloat16)

    real, made = make(), build_on_meta(make)

    def describe(model):
        return {
            name: (tuple(t.shape), t.stride(), t.dtype, t.requires_grad)
            for name, t in model.state_dict(keep_vars=True).items()
        }

    assert describe(made) == describe(real) and all_meta(made)


def test_ties_are_kept_however_they_are_made():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            shared = nn.Parameter(torch.randn(5, 4))
            self.one, self.two = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.one.weight = shared
            self.two.weight = shared
            self.three = nn.Linear(4, 5)
            self.three.weight = self.one.weight

    model = build_on_meta(Tied)
    assert model.one.weight is model.two.weight is model.three.weight
    assert len(list(model.parameters())) == 2 and all_meta(model)


def test_a_constructor_that_reads_its_parameters_is_built_all_the_same():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.full((3,), 2.0))
            self.heads = nn.ModuleList(nn.Linear(2, 2) for _ in range(int(self.weight.sum())))

    model = build_on_meta(Reads)
    assert len(model.heads) == 6 and all_meta(model)


def test_moves_to_a_gpu_are_left_out():
    def make():
        model = nn.Sequential(nn.Linear(4, 4, device="cuda"), nn.Linear(4, 4).cuda())
        return model.to("cuda", torch.float16).to(device=torch.device("cuda", 0))

    model = build_on_meta(make)
    assert all_meta(model) and {p.dtype for p in model.parameters()} == {torch.float16}


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: nn.Sequential(m, nn.Linear(8, 2))])
def test_a_module_that_existed_before_is_copied_not_changed(wrap):
    mine = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    mine.tied = mine[0]
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    made = build_on_meta(lambda: wrap(mine))
    assert all_meta(made)
    assert not any(tensor.is_meta for tensor in (*mine.parameters(), *mine.buffers()))
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    copied = on_meta(mine)
    assert all_meta(copied) and copied.tied is copied[0] and not mine[0].weight.is_meta


def test_a_module_that_has_run_and_keeps_its_results_is_copied():
    class Keeps(nn.Linear):
        def forward(self, x):
            self.last, self.all = super().forward(x), [x + self.bias.sum()]
            return self.last

    mine = Keeps(4, 4)
    mine(torch.ones(2, 4))
    last = mine.last
    copied = on_meta(mine)
    assert all_meta(copied) and mine.last is last and last.grad_fn is not None and not last.is_meta
    assert copied(torch.empty(2, 4, device="meta")).shape == (2, 4)


@pytest.mark.parametrize("made", [on_meta, lambda model: build_on_meta(lambda: model)])
def test_lazy_parameters_get_their_shape_on_meta(made):
    mine = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(3))
    copied = made(mine)
    assert copied(torch.empty(2, 3, 8, 8, device="meta")).shape == (2, 3)
    assert all_meta(copied) and copied[3].weight.shape == (3, 144)
    assert all(nn.parameter.is_lazy(p) for p in mine[0].parameters()) and mine[0].weight.device.type == "cpu"


def test_models_of_other_threads_stay_real_and_nothing_is_left_behind():
    other = []

    def make():
        thread = threading.Thread(target=lambda: other.append(nn.Linear(3, 3)))
        thread.start()
        thread.join()
        return nn.Linear(2, 2)

    assert all_meta(build_on_meta(make))
    assert not other[0].weight.is_meta and not nn.Linear(2, 2).weight.is_meta
    assert torch.linspace(0, 1, 2).tolist() == [0, 1]


def test_what_the_factory_raises_comes_out_and_the_hooks_are_gone():
    def broken():
        nn.Linear(2, 2)
        raise KeyError("no such layer")

    with pytest.raises(KeyError, match="no such layer"):
        build_on_meta(broken)
    assert not nn.Linear(2, 2).weight.is_meta


def test_reading_a_large_parameter_back_is_refused_by_torchs_own_words():
    def make():
        return nn.Linear(int(nn.Linear(2048, 2048).weight.sum()), 1)

    with pytest.raises(RuntimeError, match="meta"):
        build_on_meta(make)


# The peak is read as VmHWM, which begins anew with a program: a child's ru_maxrss can be that of the process it was
# forked from, here a long test session.
SEVEN_BILLION = """
import torch
from torch import nn
from featurize.recording.skeleton import build_on_meta

class Layer(nn.Module):
    def __init__(self, width=4096, inner=11008):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 32)
        self.gate, self.up, self.down = nn.Linear(width, inner), nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.randn(width, width) / width)
        self.register_buffer("mask", torch.ones(4096, 4096, dtype=torch.bool).tril())
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.xavier_normal_(p)

def make():
    return nn.Sequential(nn.Embedding(32000, 4096), *[Layer() for _ in range(32)], nn.Linear(4096, 32000))

model = build_on_meta(make)
with open("/proc/self/status") as status:
    peak_kib = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
print(sum(p.numel() for p in model.parameters()), peak_kib // 1024)
"""


@pytest.mark.slow
def test_seven_billion_parameters_take_less_than_a_gib():
    done = subprocess.run([sys.executable, "-c", SEVEN_BILLION], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    parameters, rss_mib = map(int, done.stdout.split())
    assert parameters > 7e9 and rss_mib < 1024, (parameters, rss_mib)


@pytest.mark.parametrize(
    ("fill", "error"),
    [
        (lambda weight: nn.init.kaiming_uniform_(weight, nonlinearity="cosine"), ValueError),
        (lambda weight: nn.init.kaiming_uniform_(weight[0]), ValueError),
        (lambda weight: nn.init.constant_(weight, "0"), TypeError),
        (lambda weight: nn.init.constant_(weight, torch.zeros(10)), RuntimeError),
        (lambda weight: nn.init.constant_(nn.LazyLinear(4).weight, 0.0), ValueError),
    ],
)
def test_what_an_initialiser_refuses_is_refused_on_meta(fill, error):
    with pytest.raises(error):
        build_on_meta(lambda: fill(nn.Linear(8, 4).weight))


@pytest.mark.parametrize("make", [torch.zeros, torch.ones])
def test_a_wrong_shape_is_refused_in_the_functions_own_words(make):
    with pytest.raises(TypeError, match=rf"^{make.__name__}\(\)"):
        build_on_meta(lambda: make((3000, "3")))
