"""WatchFinite: which rank made a number that is not finite? Values that are to travel, or have arrived, are watched."""

from dataclasses import dataclass

import torch
from torch import fx

from optimus_compiler.passes.base import Pass, PassReport
from optimus_compiler.passes.rewrite import ancestors, insert
from optimus_compiler.program import PROBE, WATCH, Program, Segment, WatchPoint

aten, c10d, ops = torch.ops.aten, torch.ops._c10d_functional, torch.ops.optimus

SENDING = {
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
    ops.send_tokens.default,
    ops.return_tokens.default,
}


@dataclass(frozen=True)
class WatchFinite(Pass):
    """Finiteness of what crosses ranks, forward and backward, without a host sync and without a change of any bit.

    1. A point is a floating-point value where a layer ends (local) and, in a pipeline, begins (received), before a
       collective (local) and after it (received). Stages of a pipeline begin and end with layers.
    2. Forward: the sum of the value, in fp32, is finite just when the value is. A segment's sums are one output
       `watch.N` [points] of the program.
    3. Backward: add a probe to the value, an element of an input that is -0.0 (x + -0.0 is x, bit for bit). The
       probe's gradient is the sum of the value's gradient.
    4. The runtime reads sums and probe gradients only when the loss or the gradient norm is not finite. On the rank
       that is to blame the first value that is not finite is a local one; on its victims it is a received one.
    """

    def run(self, program: Program) -> PassReport:
        made = {name for segment in program.segments if segment.kind != "const" for name in segment.outputs}
        count = 0
        for group in program.groups():
            if group[0].kind in ("layer", "head"):
                points = _points_of(program, group, made)
                if points:
                    _watch(program, group, points)
                    count += len(points) * len(group)
        return self.report(count, f"{count} values watched, forward and backward")


@dataclass(frozen=True)
class _Point:
    """A value, those of its readers that get it through the probe (None: all), and what it is."""

    value: fx.Node
    readers: tuple[fx.Node, ...] | None
    point: WatchPoint


def _points_of(program: Program, group: list[Segment], made: set[str]) -> list[_Point]:
    """In the order in which forward comes to them."""
    segment, points = group[0], []
    kind = segment.kind
    for name, node in zip(segment.inputs, segment.placeholders()[len(segment.parameters) :], strict=True):
        if program.mesh.pp > 1 and name in made and _is_hidden(node):  # else it is the output of the layer before
            points.append(_Point(node, None, WatchPoint(f"the input of a {kind}", is_local=False)))
    logits = program.outputs.get(
        "logits"
    )  # what only they need, training does not run: a sum of it would keep it alive
    results = zip(segment.outputs, segment.results(), strict=True)
    trained = set().union(*(ancestors(node) for name, node in results if name != logits))
    for node in segment.graph.graph.nodes:
        if node.target not in SENDING or node not in trained:
            continue
        what = str(node.target).split(".")[1]
        for source in node.all_input_nodes:
            if _is_hidden(source):
                points.append(_Point(source, (node,), WatchPoint(f"what goes into {what} in a {kind}", is_local=True)))
        for result in _results_of(node):
            if _is_hidden(result):
                points.append(_Point(result, None, WatchPoint(f"what comes out of {what} in a {kind}", is_local=False)))
    for node in dict.fromkeys(segment.results()):
        if kind == "layer" and _is_hidden(node):
            output = segment.graph.graph.output_node()
            points.append(_Point(node, (output,), WatchPoint(f"the output of a {kind}", is_local=True)))
    return points


def _is_hidden(node: fx.Node) -> bool:
    """Whether a node is a floating-point tensor of activations: router statistics and indices are none."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() >= 2


def _results_of(collective: fx.Node) -> list[fx.Node]:
    """The values that a collective gives: behind its wait, or behind the getitems of its tuple."""
    if isinstance(collective.meta.get("val"), torch.Tensor):
        waits = [user for user in collective.users if user.target is c10d.wait_tensor.default]
        return waits or [collective]
    return list(collective.users)


def _watch(program: Program, group: list[Segment], points: list[_Point]) -> None:
    graph = group[0].graph.graph
    probes = torch.full((len(points),), -0.0)
    with program.fake_mode:
        probe = group[0].add_input(PROBE.rstrip("."), torch.empty_like(probes))
    sums = []
    for index, each in enumerate(points):
        value = each.value
        readers = tuple(value.users) if each.readers is None else each.readers
        place = value if value.op != "placeholder" else group[0].placeholders()[-1]
        with graph.inserting_after(place):
            constant = insert(program, graph, aten.detach.default, value, like=value)
        with graph.inserting_after(constant):
            total = insert(program, graph, aten.sum.default, constant, like=value, dtype=torch.float32)
        with graph.inserting_after(total):
            element = insert(program, graph, aten.select.int, probe, 0, index, like=value)
        with graph.inserting_after(element):
            probed = insert(program, graph, aten.add.Tensor, value, element, like=value)
        for reader in readers:
            reader.replace_input_with(value, probed)
        sums.append(total)
    with graph.inserting_before(graph.output_node()):
        group[0].add_output(insert(program, graph, aten.stack.default, sums, like=sums[-1]))
    for segment in group:
        number = len(program.watch_points)
        name = f"{WATCH}{number}"
        segment.inputs = (*segment.inputs, f"{PROBE}{number}")
        segment.outputs = (*segment.outputs, name)
        program.constants[f"{PROBE}{number}"] = probes.clone()
        program.outputs[name] = name
        program.watch_points[number] = tuple(each.point for each in points)
