"""The blocks that a step of a `cnn` takes and gives back, from its config alone, in the order of a traced step.

Start reading at `cnn_program`. `featurize.trace` records the same of a real step; a test compares the two.
"""

from __future__ import annotations

from featurize.device_spec import DeviceSpec
from featurize.families import cnn
from featurize.library_calls import winograd_bytes
from featurize.trial import OPTIMIZERS
from learn.fastpath.fast_blocks import SMALL_REQUEST, Program, units
from learn.fastpath.fast_tape import NONE, Tape

_KEEPS_OUTPUT = frozenset(
    {"relu", "tanh"}
)  # activations whose backward reads what they gave; the others' what they got


class _Step(Tape):
    """The tape of one config's step.

    weights    bytes of convolutions' and the last layer's weights, in the order of the model's parameters
    gradients  their slots, in the same order
    nodes      what the backward pass goes through; None while nothing is kept for it
    """

    def __init__(self, config: cnn.Config, spec: DeviceSpec) -> None:
        super().__init__(empties_cache=config.cudnn_benchmark)
        self.config, self.spec = config, spec
        self.batch = config.batch_size
        self.half = config.precision in ("bf16", "fp16")
        self.width = 2 if self.half else 4  # bytes of an element
        self.copies = not config.channels_last and (spec.multiplies_fp32 or self.half)
        self.transforms = not (config.channels_last or self.copies)
        self.weights: list[int] = []
        self.gradients: list[int] = []
        self.nodes: list | None = []
        self._number: dict[object, int] = {}  # name of a convolution -> place of its weight
        self._half_weights: dict[int, int] = {}  # place -> slot of autocast's copy

    # ---- forward: each gives the slot of the output, referred to once

    def convolution(self, x: int, name: object, inputs: int, outputs: int, kernel: int, side_in: int, side_out: int,
                    *, first: bool = False) -> int:  # fmt: skip
        weight = self._number.get(name)
        if weight is None:
            weight = self._number[name] = len(self.weights)
            self.weights.append(4 * inputs * outputs * kernel**2)
            self.gradients.append(NONE)
        elements_in, elements_out = self.batch * inputs * side_in**2, self.batch * outputs * side_out**2
        cast = NONE
        if first and self.half:
            cast = x = self.new(2 * elements_in)
        if self.half and weight not in self._half_weights:
            self._half_weights[weight] = self.new(self.weights[weight] // 2)
        out = self.new(self.width * elements_out)
        nbytes_in, nbytes_out, of_weight = (
            self.width * elements_in, self.width * elements_out, self.weights[weight] * self.width // 4,
        )  # fmt: skip
        shapes = (inputs, outputs, kernel, side_in, side_out)
        takes = 0
        if self.copies and kernel > 1:
            takes = nbytes_in + of_weight + nbytes_out
        elif self.transforms and kernel == 3 and side_out > side_in - kernel:  # its stride is 1
            takes = winograd_bytes(inputs, (self.batch, outputs, side_out, side_out))
        if takes:
            self.workspace(takes)
        self.tries("forward", *shapes)
        if self.nodes is not None:
            self.keep(x)
            self.nodes.append((True, x, nbytes_in, weight, of_weight, takes, first, shapes))
        if cast != NONE:
            self.release(cast)
        return out

    def plain(
        self, x: int, elements_in: int, elements_out: int, *, keeps: str = "", mask: int = 0, more: int = 0
    ) -> int:
        """Run an operator other than a convolution; its output.

        keeps: `input`, `output` or neither for its backward; mask: bytes that it makes and keeps besides; more: bytes
        that its backward makes besides, for a moment.
        """
        out = self.new(self.width * elements_out)
        made = self.new(mask) if mask else NONE
        if self.nodes is not None:
            kept = self.keep(x) if keeps == "input" else self.keep(out) if keeps == "output" else NONE
            self.nodes.append((False, kept, self.width * elements_in, made, more))
        elif mask:
            self.release(made)
        return out

    def styled(
        self, x: int, name: object, inputs: int, outputs: int, side_in: int, side_out: int, *, first: bool
    ) -> int:
        """Run `featurize.modules.conv_block`; its output. `x` stays referred to."""
        config, batch = self.config, self.batch
        before, after = cnn.padding(config)
        elements = batch * outputs * side_out**2
        held = x
        if before != after:
            padded = side_in + before + after
            x = self.padded(x, batch * inputs * side_in**2, batch * inputs * padded**2, first=first)
            side_in = padded
        out = self.convolution(x, name, inputs, outputs, config.kernel_size, side_in, side_out, first=first)
        if x != held:
            self.release(x)
        x = out
        if config.batch_norm:
            x = self.next(x, elements, keeps="input")
        if config.activation != "identity":
            kept = "output" if config.activation in _KEEPS_OUTPUT else "input"
            more = self.width * elements if config.activation == "prelu" else 0
            x = self.next(x, elements, keeps=kept, more=more)
        if config.dropout > 0:
            x = self.next(x, elements, mask=elements)
        return x

    def next(self, x: int, elements: int, *, keeps: str = "", mask: int = 0, more: int = 0) -> int:
        """Run `plain` on as many elements as it gives, and let go of its input; its output."""
        out = self.plain(x, elements, elements, keeps=keeps, mask=mask, more=more)
        self.release(x)
        return out

    def padded(self, x: int, elements_in: int, elements_out: int, *, first: bool) -> int:
        """Run `ZeroPad2d`; its output. The batch, which the first one pads, is in fp32 and needs no gradient."""
        width, nodes = self.width, self.nodes
        if first:
            self.width, self.nodes = 4, None
        out = self.plain(x, elements_in, elements_out)
        self.width, self.nodes = width, nodes
        return out

    def norm(self, x: int, elements: int) -> int:
        """Run a batch norm, where the network has any; its output."""
        return self.next(x, elements, keeps="input") if self.config.batch_norm else x

    # ---- backward

    def back(self, nodes: list[tuple], gradient: int) -> int:
        """Go back through `nodes`, last first; the gradient of their input, `NONE` for the batch's."""
        while nodes:
            node = nodes.pop()
            if not node[0]:
                _, kept, nbytes, mask, more = node
                of_input = self.new(nbytes)
                if more:
                    self.release(self.new(more))
                self.release(gradient)
                if kept != NONE:
                    self.release(kept)
                if mask != NONE:
                    self.release(mask)
                gradient = of_input
                continue
            _, x, nbytes_in, weight, of_weight, takes, first, shapes = node
            of_input = NONE if first else self.new(nbytes_in)
            of_weights = self.new(of_weight)
            if takes:
                if not first:
                    self.workspace(takes)
                    self.tries("data", *shapes)
                self.workspace(takes + (nbytes_in if self.copies else 0))
            self.tries("weight", *shapes)
            self.release(gradient)
            self.release(x)
            if self.half:
                if weight in self._half_weights:
                    self.release(self._half_weights.pop(weight))
                whole = self.new(self.weights[weight])
                self.release(of_weights)
                of_weights = whole
            self.gradients[weight] = of_weights
            gradient = of_input
        return gradient


def cnn_program(config: cnn.Config, spec: DeviceSpec) -> tuple[Program, int]:
    """Return the large blocks of a job's first two steps on one GPU model, and the most bytes alive in small ones.

    The job runs in the usual training loop, as `featurize.trace.trace_step` has it.
    """
    tape = _Step(config, spec)
    body = cnn.blocks(config)
    batch, width = config.batch_size, tape.width
    image = 4 * batch * config.channels * config.image_size**2
    x = new_batch = tape.new(image)
    old_batch = tape.absent(tape.sizes[x])  # the step before left it, as it left `old_output`
    start = [x, ~old_batch] if tape.events else []
    tape.events.clear()
    tape.keep(x)
    passed: list[tuple] = []  # block, its input, its nodes; inputs of recomputed blocks are kept
    recompute = config.activation_checkpointing
    for number, block in enumerate(body):
        tape.nodes = None if recompute else []
        out = _forward(tape, number, block, x)
        if recompute:
            tape.keep(x)
        passed.append((number, block, x, tape.nodes))
        tape.release(x)
        x = out
    last = body[-1]
    elements = batch * last.outputs * last.map_out**2
    pooled = tape.new(width * batch * last.outputs)
    tape.release(x)
    logits = batch * config.classes
    head = len(tape.weights)
    tape.weights.append(4 * last.outputs * config.classes)
    half_head = tape.new(tape.weights[head] // 2) if tape.half else NONE
    output = tape.new(width * logits)
    tape.handle(spec.architecture.blas_workspace_bytes)
    raw = output
    if config.softmax:
        output = tape.new(4 * logits)
        tape.release(raw)
    old_output = tape.absent(tape.sizes[output])
    if tape.sizes[output] > SMALL_REQUEST:
        tape.events.append(~old_output)
    cast = tape.new(4 * logits) if tape.half and not config.softmax else NONE
    chances = tape.new(4 * logits)
    if cast != NONE:
        tape.release(cast)
    # ---- backward
    gradient = tape.new(4 * logits)
    after = tape.new(4 * logits)
    tape.release(gradient)
    tape.release(chances)
    gradient = after
    if config.softmax:
        after = tape.new(4 * logits)
        tape.workspace(4 * logits)
        tape.release(gradient)
        gradient = after
    if tape.half:
        after = tape.new(2 * logits)
        tape.release(gradient)
        gradient = after
    small = tape.new(width * batch * last.outputs)
    tape.handle(spec.architecture.blas_workspace_bytes)
    made = tape.new(tape.weights[head] * width // 4)
    tape.release(gradient)
    tape.release(pooled)
    if tape.half:
        tape.release(half_head)
        whole = tape.new(tape.weights[head])
        tape.release(made)
        made = whole
    tape.gradients.append(made)
    gradient = tape.new(width * elements)
    tape.release(small)
    for number, block, entered, nodes in reversed(passed):
        if recompute:
            tape.nodes = nodes = []
            tape.release(_forward(tape, number, block, entered))
        gradient = _backward(tape, number, block, nodes, gradient)
        if recompute:
            tape.release(entered)
    zeroed = [~slot for slot in tape.gradients if tape.sizes[slot] > SMALL_REQUEST]
    states = int(OPTIMIZERS[config.optimizer].states)  # whole for those that the fast path answers for
    setup, state, end = [], [], []
    for nbytes in tape.weights:
        if (size := units(nbytes)) > SMALL_REQUEST:
            setup.append(tape.absent(size))
            state += [tape.absent(size) for _ in range(states)]
            end += [tape.absent(size)] * (states == 2)  # the square roots of a for-each Adam
    end += [~slot for slot in reversed(end)]
    renamed = [(new_batch, old_batch), (output, old_output)]
    program = Program(tape.sizes, setup, start, zeroed, tape.events, state, end, renamed)
    small = sum(nbytes for nbytes in tape.weights if units(nbytes) <= SMALL_REQUEST) * (1 + states)
    return program, 512 * tape.most_small_units + small


def _forward(tape: _Step, number: int, block: cnn.ConvBlock, x: int) -> int:
    config, batch = tape.config, tape.batch
    first = number == 0
    inputs, outputs, side, after = block.inputs, block.outputs, block.map_in, block.map_out
    elements = batch * outputs * after**2
    if block.kind == "plain":
        return tape.styled(x, number, inputs, outputs, side, after, first=first)
    if block.kind == "pool":
        return tape.plain(x, batch * inputs * side**2, elements, keeps="input", mask=8 * elements)
    if block.kind == "residual":
        shortcut = tape.keep(x)
        nodes = tape.nodes
        of_shortcut: list | None = None if nodes is None else []
        if inputs != outputs or block.stride != 1:
            tape.nodes = of_shortcut
            tape.release(x)
            shortcut = tape.convolution(x, (number, "shortcut"), inputs, outputs, 1, side, after, first=first)
            shortcut = tape.norm(shortcut, elements)
            tape.nodes = nodes
        inner = tape.styled(x, (number, 1), inputs, outputs, side, after, first=first)
        end = tape.styled(inner, (number, 2), outputs, outputs, after, after, first=False)
        tape.release(inner)
        out = tape.new(tape.width * elements)
        tape.release(end)
        tape.release(shortcut)
        if nodes is not None:
            nodes.append(of_shortcut)
        return out
    if block.kind == "dense":
        features, nodes = [x], tape.nodes
        for i in range(cnn.DENSE_LAYERS):
            wide = inputs + i * config.growth_rate
            joined = tape.new(tape.width * batch * wide * side**2)
            tape.nodes = None if nodes is None else []
            made = tape.styled(joined, (number, i), wide, config.growth_rate, side, side, first=first and i == 0)
            tape.release(joined)
            features.append(made)
            if nodes is not None:
                nodes.append(tape.nodes)
        tape.nodes = nodes
        out = tape.new(tape.width * elements)
        for feature in features[1:]:
            tape.release(feature)
        return out
    assert block.kind == "transition"
    wide = batch * outputs * side**2
    made = tape.convolution(x, number, inputs, outputs, 1, side, side)
    made = tape.norm(made, wide)
    made = tape.next(made, wide, keeps="output")
    if after != side:
        out = tape.plain(made, wide, elements, keeps="input")
        tape.release(made)
        made = out
    return made


def _backward(tape: _Step, number: int, block: cnn.ConvBlock, nodes: list, gradient: int) -> int:
    config, batch = tape.config, tape.batch
    if block.kind == "residual":
        of_shortcut = nodes.pop()
        tape.keep(gradient)
        input_gradient = tape.back(nodes, gradient)
        if not of_shortcut:  # the gradient goes past: it is added to
            if input_gradient == NONE:
                tape.release(gradient)
                return NONE
            tape.release(input_gradient)
            return gradient
        other = tape.back(of_shortcut, gradient)
        if other != NONE:
            tape.release(other)
        return input_gradient
    if block.kind == "dense":
        side = block.map_in
        growth = tape.width * batch * config.growth_rate * side**2
        sums: list[int] = []
        for i in reversed(range(cnn.DENSE_LAYERS)):
            last = i == cnn.DENSE_LAYERS - 1
            mine = tape.keep(gradient) if last else sums.pop()
            input_gradient = tape.back(nodes[i], mine)
            if last:
                if number:
                    sums.append(tape.new(tape.width * batch * block.inputs * side**2))
                else:
                    sums.append(NONE)
                sums += [tape.new(growth) for _ in range(cnn.DENSE_LAYERS - 1)]
                tape.release(gradient)
            if input_gradient != NONE:
                tape.release(input_gradient)
        return sums[0]
    return tape.back(nodes, gradient)
