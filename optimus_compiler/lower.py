"""lower: one segment's graph -> a differentiable function, straight through AOTAutograd and Inductor.

Not through torch.compile: no guards, no recompiles, cheaper calls, gradients of another dtype than the weights. The
private interfaces of torch are all in this file; tests/test_lower.py pins how they behave.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.distributed._functional_collectives  # else backward through a collective raises "view modified inplace"
from torch import Tensor, fx
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from optimus_compiler.graphs import copy_graph
from optimus_compiler.mesh import DIMENSIONS, Mesh
from optimus_compiler.program import PROBE, Program, Segment

Backend = Literal["inductor", "aot_eager", "eager"]
Function = Callable[..., Sequence[Tensor]]
COLLECTIVES = ("_c10d_functional", "optimus")  # namespaces of operations that may take the name of a group


def lower(segment: Segment, requires_grad: Sequence[bool], backend: Backend, mesh: Mesh | None = None) -> Function:
    """Compiles a segment: parameters, then inputs -> a tuple of its outputs, differentiable with respect to the inputs
    that `requires_grad` marks. Its collectives run over the groups of `mesh`.

    A mark that is missing gives an exact loss and wrong gradients without a word: take the marks from gradient_marks,
    and check them on the first call.
    """
    graph = copy_graph(segment.graph)
    _name_groups(graph, mesh or Mesh.abstract())
    if backend == "eager":
        return graph
    if any(isinstance(size, torch.SymInt) for node in graph.graph.nodes for size in _shape(node)):
        raise ValueError(
            f"the {segment.kind} has sizes that depend on the data (a loop over experts that no pass replaced): run "
            "FuseSparseMoE, or use backend='eager'"
        )
    # compiled once for every caller, so not in the grad mode of the first: under no_grad there would be no backward
    with torch.inference_mode(False), torch.enable_grad():
        # a ShapeEnv is what lets Inductor's on-disk caches be used on this path
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            marked = zip(segment.placeholders(), requires_grad, strict=True)
            examples = [_empty(node.meta["val"], mark) for node, mark in marked]
        with tracing(TracingContext(mode)):
            return _inductor(graph, examples) if backend == "inductor" else _aot_eager(graph, examples)


def trace(
    graph: fx.GraphModule, placeholders: Sequence[fx.Node], requires_grad: Sequence[bool]
) -> tuple[fx.GraphModule, fx.GraphModule | None]:
    """The forward and backward graphs that AOTAutograd makes of a segment's graph, on fake tensors; None: no backward.

    Forward's results are the segment's, then what backward keeps. Collectives keep the names of mesh dimensions.
    """
    found: list[fx.GraphModule] = []

    def partition(*arguments: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        from functorch.compile import min_cut_rematerialization_partition

        found.extend(min_cut_rematerialization_partition(*arguments, **options))
        _write_in_place(found[1])
        return found[0], found[1]

    def forward_alone(module: fx.GraphModule, _: object) -> Function:
        if not found:
            found.append(module)
        return _boxed(module)

    with torch.inference_mode(False), torch.enable_grad():
        mode = FakeTensorMode(shape_env=ShapeEnv())
        with mode:
            examples = [_empty(node.meta["val"], mark) for node, mark in zip(placeholders, requires_grad, strict=True)]
        with tracing(TracingContext(mode)):
            _through_aot(graph, examples, forward_alone, partition)
    return found[0], found[1] if len(found) > 1 else None


def _name_groups(graph: fx.GraphModule, mesh: Mesh) -> None:
    """Puts the names of process groups where a program names mesh dimensions ("ep")."""
    for node in graph.graph.nodes:
        if str(getattr(node.target, "namespace", "")) in COLLECTIVES:
            node.args = tuple(
                mesh.group_name(*argument.split("+"))
                if isinstance(argument, str) and set(argument.split("+")) <= set(DIMENSIONS)
                else argument
                for argument in node.args
            )
    graph.recompile()


# torch's compilers take seconds to import: nobody should wait for them before something is compiled


def _inductor(graph: fx.GraphModule, examples: list[Tensor]) -> Function:
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.lowering import make_fallback

    # Inductor adds up an embedding's gradient with atomics, in another order each time; aten's own has one order
    embedding_gradient = torch.ops.aten.embedding_dense_backward.default
    table = dict(select_decomp_table())
    del table[embedding_gradient]
    # said outright: left to itself, Inductor refuses this fallback wherever the variable CI is set
    make_fallback(embedding_gradient, warn=False, override_decomp=True)
    tags = [f"{index} {node.meta['recompute'].name}" for index, node in enumerate(graph.graph.nodes)
            if "recompute" in node.meta]  # fmt: skip
    if not tags:
        return compile_fx(graph, examples, decompositions=table)  # type: ignore[return-value]
    # the caches do not look at tags; and bf16 is rounded where eager rounds it, or recomputing would change it
    digest = hashlib.sha256("\n".join(tags).encode()).hexdigest()
    tagged = torch.compiler.config.patch(cache_key_tag=digest)  # type: ignore[attr-defined]
    with tagged, torch._inductor.config.patch(emulate_precision_casts=True):
        return compile_fx(graph, examples, decompositions=table)  # type: ignore[return-value]


def _aot_eager(graph: fx.GraphModule, examples: list[Tensor]) -> Function:
    """AOTAutograd with Inductor's partitioner, both graphs run as they are."""
    from functorch.compile import min_cut_rematerialization_partition

    def compiler(module: fx.GraphModule, _: object) -> Function:
        _write_in_place(module)
        return _boxed(module)

    return _through_aot(graph, examples, compiler, min_cut_rematerialization_partition)


def _write_in_place(module: fx.GraphModule) -> None:
    """Lets an operation that adds to an input do so: AOTAutograd has it write to a copy, and copies that back."""
    functional = torch.ops.higher_order.auto_functionalized_v2
    position = {node: index for index, node in enumerate(module.graph.nodes)}
    for node in module.graph.find_nodes(op="call_function", target=functional):
        operation, arguments = node.args[0], dict(node.kwargs)
        bases = arguments.pop("_all_bases")
        schema = operation._schema
        for argument in schema.arguments:
            if argument.alias_info is not None and argument.alias_info.is_write:
                arguments[argument.name] = bases[arguments.pop(f"_{argument.name}_base_index")]
        results = {user.args[1]: user for user in node.users}
        copies = [user for index, result in results.items() if index >= len(schema.returns) for user in result.users]
        readers = {user for base in bases for user in base.users} - {node, *copies}
        if any(name.startswith("_") for name in arguments) or any(position[user] > position[node] for user in readers):
            continue  # it writes to a view, or somebody reads what was there before
        with module.graph.inserting_before(node):
            in_place = module.graph.call_function(operation, kwargs=arguments)
        for copy in copies:
            module.graph.erase_node(copy)
        for index, result in results.items():
            if index >= len(schema.returns):
                module.graph.erase_node(result)
        node.replace_all_uses_with(in_place)
        module.graph.erase_node(node)
    module.recompile()


def _through_aot(
    graph: fx.GraphModule, examples: list[Tensor], compiler: Callable[..., Function], partition: Callable[..., Any]
) -> Function:
    from torch._dynamo.backends.common import aot_autograd

    return aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)(graph, examples)


def _boxed(module: fx.GraphModule) -> Function:
    from functorch.compile import make_boxed_func

    return make_boxed_func(module.forward)


def gradient_marks(program: Program) -> dict[int, tuple[bool, ...]]:
    """For each distinct graph (by id), which placeholders need a gradient in any segment that shares it."""
    return _differentiability(program)[0]


def values_carrying_gradients(program: Program) -> set[str]:
    """The names of the values through which gradients flow back to a parameter."""
    return _differentiability(program)[1]


def _differentiability(program: Program) -> tuple[dict[int, tuple[bool, ...]], set[str]]:
    """Autograd itself is asked, on fake tensors: export records no differentiability (every `val` says False)."""
    marks = {id(group[0].graph): (False,) * len(group[0].placeholders()) for group in program.groups()}
    known: dict[tuple[int, tuple[bool, ...]], tuple[bool, ...]] = {}
    carrying = {name for segment in program.segments for name in segment.inputs if name.startswith(PROBE)}
    while True:
        before = (dict(marks), set(carrying))
        for segment in program.segments:
            graph = id(segment.graph)
            wanted = [program.parameters[name].trainable for name in segment.parameters]
            wanted += [name in carrying for name in segment.inputs]
            marks[graph] = tuple(a or b for a, b in zip(marks[graph], wanted, strict=True))
            if (graph, marks[graph]) not in known:
                known[graph, marks[graph]] = _which_outputs_carry(program, segment, marks[graph])
            carrying |= {
                name for name, carries in zip(segment.outputs, known[graph, marks[graph]], strict=True) if carries
            }
        if before == (marks, carrying):
            return marks, carrying


def _which_outputs_carry(program: Program, segment: Segment, marks: tuple[bool, ...]) -> tuple[bool, ...]:
    with program.fake_mode, torch.enable_grad():
        marked = zip(segment.placeholders(), marks, strict=True)
        inputs = [_empty(node.meta["val"], mark) for node, mark in marked]
        return tuple(result.requires_grad for result in segment.graph(*inputs))


def _shape(node: fx.Node) -> Sequence[int]:
    value = node.meta.get("val")
    return value.shape if isinstance(value, Tensor) else ()


def _empty(like: Tensor, requires_grad: bool) -> Tensor:
    """A tensor of the same shape, strides, dtype and device, in the fake mode that is on."""
    empty = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
    return empty.requires_grad_(requires_grad)
