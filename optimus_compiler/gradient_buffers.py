"""add_gradient_buffers: backward adds the gradients of expert weights to the optimizer's buffers, and returns none.

Not a pass of the pipeline: whether there are buffers, and in which dtype, is known when a segment is about to run.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, fx

from optimus_compiler.program import Segment
from optimus_compiler.runtime.kernels import grouped_mlp  # noqa: F401  (registers the op)

ops = torch.ops.optimus


def add_gradient_buffers(segment: Segment, buffers: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Appends a placeholder for the buffer of each parameter that is an expert table of a grouped_mlp.

    buffers: fake tensors like the buffers, by the parameter's name; a grouped_mlp that lacks one is left alone. Returns
    the parameters' names in the order of the new placeholders.
    """
    names = dict(zip(segment.placeholders(), segment.parameters, strict=False))
    added: dict[str, fx.Node] = {}
    for node in segment.graph.graph.find_nodes(op="call_function", target=ops.grouped_mlp.default):
        tables = [names[table] for table in node.args[2:4] if names.get(table) in buffers]
        if len(tables) < 2:
            continue
        for name in tables:
            if name not in added:
                added[name] = segment.add_input(f"gradient_{len(added)}", buffers[name])
        node.args = (*node.args[:7], *(added[name] for name in tables))
    segment.graph.recompile()
    return tuple(added)
