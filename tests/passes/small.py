"""Programs of one segment, traced from a function: what a pass is tested on."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch.fx.experimental.proxy_tensor import make_fx

from optimus_compiler.program import Program, Segment


def small_program(function: Callable[..., Any], *inputs: Tensor) -> Program:
    """A program whose only segment (a layer) computes the function; one value a result: out0, out1, ..."""
    module = make_fx(function, tracing_mode="fake", pre_dispatch=True)(*inputs)
    output = module.graph.output_node()
    if not isinstance(output.args[0], (tuple, list)):
        output.args = ((output.args[0],),)
    module.graph.set_codegen(fx.graph.CodeGen())
    module.recompile()
    mode = detect_fake_mode([node.meta["val"] for node in module.graph.nodes if "val" in node.meta])
    assert mode is not None
    names = tuple(f"in{i}" for i in range(len(inputs)))
    outputs = tuple(f"out{i}" for i in range(len(tuple(output.args[0]))))  # type: ignore[arg-type]
    segment = Segment("layer", module, (), names, outputs)
    return Program([segment], {}, names, {name: name for name in outputs}, {}, {}, 1, 1, mode)


def run(program: Program, *inputs: Tensor) -> tuple[Tensor, ...]:
    """The results of the program's only segment."""
    (segment,) = program.segments
    return tuple(segment.graph(*(value.clone() for value in inputs)))


def operations(program: Program) -> list[str]:
    """Names of the operations of the first segment, in order."""
    graph: fx.Graph = program.segments[0].graph.graph
    return [str(node.target).removeprefix("aten.") for node in graph.nodes if node.op == "call_function"]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers that do not change from call to call."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
