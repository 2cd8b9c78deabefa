"""The fast path's replay of a step: the blocks of a traced step, placed as the allocator simulator places them."""

import random

import numpy as np
import pytest

from featurize import library_calls
from featurize.allocator import CachingAllocator, OutOfMemory
from featurize.device_spec import device_names, load_device
from featurize.families import cnn
from featurize.replay import outside_mib, replay
from featurize.trace import trace_config
from learn.fastpath import fast_blocks, fast_replay
from learn.fastpath.fast_blocks import EMPTY, KEPT, MIB, PROBE, UNIT, Program, reserved_bytes
from learn.fastpath.fast_cnn import cnn_program
from learn.fastpath.fast_configs import distillation_configs
from learn.fastpath.fast_tape import Tape

SPEC = load_device("A100-SXM4-40GB")
NO_LIMIT = 1 << 60
BASE = {"image_size": 64, "channels": 3, "classes": 100, "base_filters": 64, "depth": 6, "batch_size": 32}
NETWORKS = {
    "norm and dropout": {"topology": "uniform", "batch_norm": True, "dropout": 0.2, "activation": "gelu"},
    "even kernels and pools": {"topology": "pyramid", "kernel_size": 2, "pooling": True, "pool_interval": 2},
    "a 1x1 kernel": {"topology": "bottleneck", "kernel_size": 1, "activation": "identity"},
    "residual blocks": {"topology": "residual", "dropout": 0.2, "kernel_size": 2, "batch_norm": True},
    "residual blocks of one width": {"topology": "residual", "base_filters": 2048, "batch_size": 4},
    "dense blocks": {"topology": "dense", "depth": 8, "batch_norm": True, "kernel_size": 2, "pool_interval": 2},
    "one slope for all": {"topology": "hourglass", "activation": "prelu"},
    "a softmax over many classes": {"topology": "gradual", "softmax": True, "classes": 20_000},
    "half precision": {"topology": "residual", "precision": "bf16", "activation": "elu", "dropout": 0.1},
    "momentum": {"topology": "reverse_pyramid", "optimizer": "momentum", "base_filters": 500},
    "algorithms that are tried": {"topology": "pyramid", "cudnn_benchmark": True},
}


def order(program: Program):
    """(event, whether in the first step) of two steps; None where the older slots take over."""
    first = (program.setup, program.start, program.step, program.state, program.end)
    yield from ((event, True) for events in first for event in events)
    yield None, False
    second = (program.start, program.zeroed, program.step, program.end)
    yield from ((event, False) for events in second for event in events)


def simulated_bytes(program: Program, capacity: int | None = None) -> int:
    """What `featurize.allocator` reserves at most. Raises `OutOfMemory`."""
    allocator = CachingAllocator(capacity)
    held: dict[int, int] = {}
    for event, first in order(program):
        if event is None:
            for slot, older in program.renamed:
                if slot in held:
                    held[older] = held.pop(slot)
        elif event < 0:
            allocator.free(held.pop(~event, None))
        elif event == EMPTY:
            if first:
                allocator.empty_cache()
        elif event >= KEPT:
            if first:
                allocator.allocate(program.sizes[event - KEPT] * UNIT)
        elif event >= PROBE:
            try:
                allocator.free(allocator.allocate(program.sizes[event - PROBE] * UNIT))
            except OutOfMemory:
                continue
        else:
            held[event] = allocator.allocate(program.sizes[event] * UNIT)
    return allocator.peak_reserved_bytes


def random_program(seed: int) -> Program:
    """A step of tensors that live for a while, some given back in the next step only."""
    rng = random.Random(seed)
    tape, alive = Tape(empties_cache=True), []
    for number in range(120):
        if number == 60:
            tape.handle(SPEC.architecture.blas_workspace_bytes)
        tape.workspace(rng.choice((3, 30, 300)) * 2**20 + rng.randrange(2**20))
        tape.tries(number // 40)
        alive.append(tape.new(rng.choice((1, 2, 4, 12, 40)) * 2**20 + rng.randrange(2**21)))
        while len(alive) > rng.randrange(4, 12):
            tape.release(alive.pop(rng.randrange(len(alive))))
    sizes = [rng.randrange(2 * MIB, 50 * MIB) for _ in range(6)]
    setup = [tape.absent(size) for size in sizes]
    state = [tape.absent(size) for size in sizes for _ in range(2)]
    end = [tape.absent(size) for size in sizes]
    batch = tape.absent(9 * MIB)
    older = tape.absent(9 * MIB)
    zeroed = [~slot for slot in alive if tape.sizes[slot] > fast_blocks.SMALL_REQUEST]
    end += [~slot for slot in reversed(end)]
    return Program(tape.sizes, setup, [batch, ~older], zeroed, tape.events, state, end, [(batch, older)])


@pytest.mark.parametrize("seed", range(12))
def test_large_blocks_are_placed_as_the_allocator_simulator_places_them(seed):
    program = random_program(seed)
    unlimited = simulated_bytes(program)
    assert reserved_bytes(program, NO_LIMIT) == unlimited
    for share in (0.5, 0.7, 0.8, 0.9, 0.95):
        capacity = int(unlimited * share)
        try:
            wanted = simulated_bytes(program, capacity)
        except OutOfMemory:
            wanted = unlimited
        assert reserved_bytes(program, capacity) == wanted


def large_blocks_traced(config: cnn.Config, spec=SPEC) -> list[tuple[str, int]]:
    trace = trace_config(config, training_loop=True, device=spec)
    found = []
    for event in trace.events:
        call = trace.blocks[event.block].call
        nbytes = event.nbytes if call is None else library_calls.workspace_bytes(call, spec)
        kind = "given back" if nbytes < 0 else "kept" if call is None or call.kind == "cublas" else "workspace"
        if fast_blocks.units(abs(nbytes)) > fast_blocks.SMALL_REQUEST:
            found.append((kind, fast_blocks.units(abs(nbytes))))
    return found


def large_blocks_written(program: Program) -> list[tuple[str, int]]:
    found, held = [], set()
    for event, first in order(program):
        if event is None:
            for slot, older in program.renamed:
                held = {older if one == slot else one for one in held}
        elif event < 0:
            if ~event in held:
                held.remove(~event)
                found.append(("given back", program.sizes[~event]))
        elif event == EMPTY or (event >= KEPT and not first):
            continue
        elif event >= KEPT:
            found.append(("kept", program.sizes[event - KEPT]))
        elif event >= PROBE:
            found.append(("workspace", program.sizes[event - PROBE]))
        else:
            held.add(event)
            found.append(("kept", program.sizes[event]))
    return found


@pytest.mark.parametrize("network", NETWORKS)
def test_a_cnns_large_blocks_are_those_of_its_traced_step_in_their_order(network):
    config = cnn.Config(**{**BASE, **NETWORKS[network]})
    assert large_blocks_written(cnn_program(config, SPEC)[0]) == large_blocks_traced(config)


@pytest.mark.parametrize("network", NETWORKS)
def test_a_cnns_large_blocks_are_those_of_its_traced_step_without_tensor_cores_for_fp32(network):
    config, spec = cnn.Config(**{**BASE, **NETWORKS[network]}), load_device("V100-SXM2-16GB")
    assert large_blocks_written(cnn_program(config, spec)[0]) == large_blocks_traced(config, spec)


def test_the_memory_of_sampled_cnns_is_what_their_traced_steps_reserve():
    configs = distillation_configs(36, seed=11, families=("cnn",))
    own = [config for index, config in enumerate(configs) if index % 2 == 0]  # as the farm samples them
    wanted = []
    for config in own:
        trace = trace_config(config, training_loop=True, device=SPEC)
        wanted.append(replay(trace, SPEC).peak_reserved / 2**20 + outside_mib(trace, SPEC))
    off = np.abs(fast_replay.replayed_mib(own, SPEC) / np.array(wanted) - 1)
    assert np.median(off) < 0.002 and np.quantile(off, 0.9) < 0.02


def test_what_libraries_take_is_what_the_trace_assumes():
    for name in device_names():
        spec, tape = load_device(name), Tape(empties_cache=False)
        tape.handle(spec.architecture.blas_workspace_bytes)
        handle = library_calls.LibraryCall(library_calls.CUBLAS)
        assert tape.sizes == [library_calls.workspace_bytes(handle, spec) // UNIT]
