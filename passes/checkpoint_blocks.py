"""The blocks of a decoder layer that can be checkpointed: which of them a node belongs to."""

import re
from typing import Literal

import torch
from torch import fx

from optimus_compiler.passes.rewrite import module_paths

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Block = Literal["norm", "attention", "moe"]
LAYER = re.compile(r"(?:.*\.)?layers\.\d+")
ONWARD = {c10d.wait_tensor.default, aten.view.default, aten.reshape.default}


def block_of(node: fx.Node) -> Block | None:
    """norm, attention or moe (an MLP too), by the class of the layer's submodule; None outside of them.

    The all-gather of sequence parallelism belongs to the block that it brings the tokens to.
    """
    if node.target is c10d.all_gather_into_tensor.default or _follows_gather(node):
        readers = [user for user in node.users if user.op == "call_function"]
        return block_of(readers[0]) if readers else _own_block(node)
    return _own_block(node)


def _own_block(node: fx.Node) -> Block | None:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    inside = [index for index, (path, _) in enumerate(stack) if LAYER.fullmatch(path)]
    if not inside or inside[-1] + 1 >= len(stack):
        return None
    kind = stack[inside[-1] + 1][1]
    name = kind if isinstance(kind, str) else kind.__name__
    if "norm" in name.rpartition(".")[2].lower():
        return "norm"
    return "attention" if "attention" in name.rpartition(".")[2].lower() else "moe"


def _follows_gather(node: fx.Node) -> bool:
    while node.target in ONWARD and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if node.target is c10d.all_gather_into_tensor.default:
            return True
    return False


def is_residual_addition(node: fx.Node) -> bool:
    """Whether a node is the layer's own sum of a block's result and what the block was given."""
    paths = module_paths(node)
    return node.target is aten.add.Tensor and bool(paths) and LAYER.fullmatch(paths[-1]) is not None
