"""FX graphs: copies of them, and facts about those that hold writes: what shares storage, what is dead."""

import operator

from torch import fx, nn


def writes_in_place(node: fx.Node) -> bool:
    """Whether an operation mutates its first argument (aten's trailing underscore)."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not schema.arguments:
        return False
    alias = schema.arguments[0].alias_info
    return alias is not None and bool(alias.is_write)


def is_view(node: fx.Node) -> bool:
    """Whether an operation returns a view of an argument, or the argument itself; one of several views included."""
    if node.target is operator.getitem:
        return is_view(node.args[0])  # type: ignore[arg-type]
    schema = getattr(node.target, "_schema", None)
    return (
        node.op == "call_function"
        and schema is not None
        and bool(schema.returns)
        and schema.returns[0].alias_info is not None
    )


def storage_root(node: fx.Node) -> fx.Node:
    """The node whose storage this one is a view of; the node itself when it owns its storage."""
    while is_view(node):
        if node.target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
            continue
        schema = node.target._schema  # type: ignore[union-attr]
        aliased = [value for argument, value in zip(schema.arguments, node.args, strict=False)
                   if argument.alias_info is not None and isinstance(value, fx.Node)]  # fmt: skip
        if not aliased:
            return node
        node = aliased[0]
    return node


def eliminate_dead_code(graph: fx.Graph) -> None:
    """Erases operations that no result depends on; a write lives as long as somebody reads the storage it writes to.

    torch.fx's own elimination keeps every write, dead or not.
    """
    live: set[fx.Node] = set()
    live_storage: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output") or any(user in live for user in node.users):
            alive = True
        else:
            alive = writes_in_place(node) and storage_root(node) in live_storage
        if alive:
            live.add(node)
            live_storage.update(storage_root(source) for source in node.all_input_nodes)
        else:
            graph.erase_node(node)


def copy_graph(module: fx.GraphModule) -> fx.GraphModule:
    """A copy that a compiler may change; the fake values are shared."""
    graph = fx.Graph()
    copied: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(module.graph, copied))
    return fx.GraphModule(nn.Module(), graph)
