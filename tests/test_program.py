"""Program: what verify refuses, what prune drops, which segments share a graph, how a parameter is built."""

from typing import Any

import pytest
import torch
from torch import Tensor

import optimus_compiler as optimus
from optimus_compiler.graphs import copy_graph
from optimus_compiler.passes import Canonicalise, PassError, PassPipeline
from optimus_compiler.program import ParameterSpec, Program, ProgramError, Segment, Source
from tests.models.twins import olmoe_config, ours
from tests.passes.small import rand, small_program

aten = torch.ops.aten


def two_layers() -> Program:
    """in0 -> layer -> out0 -> the same layer -> out1"""
    program = small_program(lambda x: x.relu(), rand(3, 4))
    (first,) = program.segments
    second = Segment("layer", copy_graph(first.graph), (), ("out0",), ("out1",))
    program.segments = [first, second]
    program.outputs = {"out1": "out1"}
    return program


def test_equal_functions_share_one_graph_and_others_do_not() -> None:
    program = two_layers()
    assert len(program.groups()) == 2
    program.deduplicate()
    assert len(program.groups()) == 1
    different = two_layers()
    node = next(n for n in different.segments[1].graph.graph.nodes if n.op == "call_function")
    node.target = aten.exp.default
    different.deduplicate()
    assert len(different.groups()) == 2
    assert different.verify() == [
        "layer 1 is not the same function as layer 0: node 1 is 'call_function aten.exp.default  (%0,) {}', "
        "not 'call_function aten.relu.default  (%0,) {}'"
    ]


def test_a_scalar_or_a_shape_makes_another_function() -> None:
    keys = {
        small_program(lambda x: x * 2, rand(3)).segments[0].key,
        small_program(lambda x: x * 3, rand(3)).segments[0].key,
        small_program(lambda x: x * 2, rand(4)).segments[0].key,
        small_program(lambda x: x * 2, rand(3).double()).segments[0].key,
    }
    assert len(keys) == 4


def test_prune_drops_what_nobody_reads() -> None:
    program = small_program(lambda x, y: (x.relu(), y.exp(), x), rand(3), rand(3))
    program.outputs = {"first": "out0", "same": "out2"}
    program.prune()
    (segment,) = program.segments
    assert segment.inputs == ("in0",)
    assert segment.outputs == ("out0",)
    assert program.outputs == {"first": "out0", "same": "in0"}  # an input passed through is the input itself


def broken(change: str) -> Program:
    program = two_layers()
    first, second = program.segments
    node = next(n for n in first.graph.graph.nodes if n.op == "call_function")
    if change == "order":
        program.segments = [second, first]
    elif change == "twice":
        second.outputs = ("out0",)
    elif change == "shape":
        node.meta["val"] = node.meta["val"].reshape(-1)
    elif change == "dtype between segments":
        second.placeholders()[0].meta["val"] = second.placeholders()[0].meta["val"].double()
    elif change == "write":
        node.target = aten.relu_.default
    elif change == "placeholders":
        first.inputs = ("in0", "in1")
    elif change == "output":
        program.outputs = {"loss": "nowhere"}
    return program


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("order", r"segment 0 \(layer\): reads out0, which nothing before it defines"),
        ("twice", "defines out0 a second time"),
        ("shape", r"relu is recorded as torch.float32 \(12,\) and computes torch.float32 \(3, 4\)"),
        ("dtype between segments", "reads out0 as torch.float64|is recorded as torch.float32"),
        ("write", "writes into .*, a segment's input"),
        ("placeholders", "the graph has 1 placeholders for 2 parameters and inputs"),
        ("output", r"the output loss \(nowhere\) is not defined"),
    ],
)
def test_verify_refuses(change: str, message: str) -> None:
    with pytest.raises(ProgramError, match=message):
        broken(change).verify()


def with_parameter(**changes: Any) -> Program:
    program = small_program(lambda w, x: (x @ w).sum(), rand(4, 6), rand(3, 4))
    spec = ParameterSpec("w", (4, 6), torch.float32, Source(("w",), (4, 6)))
    program.parameters = {"w": ParameterSpec(**{**vars(spec), **changes})}
    program.segments[0].parameters, program.segments[0].inputs = ("w",), ("in1",)
    program.inputs, program.outputs = ("in1",), {"loss": "out0"}
    return program


def test_parameters_are_checked_against_the_table() -> None:
    assert with_parameter().verify() == []
    with pytest.raises(ProgramError, match=r"parameter w is torch.float32 \(4, 7\) in the table"):
        with_parameter(shape=(4, 7)).verify()
    unreached = with_parameter()
    unreached.outputs = {"loss": "in1"}
    with pytest.raises(ProgramError, match="the trainable parameter w does not reach the loss"):
        unreached.verify()
    frozen = with_parameter(trainable=False)
    frozen.outputs = {"loss": "in1"}
    assert frozen.verify() == []


def test_local_shape_follows_the_placement() -> None:
    spec = ParameterSpec("w", (6, 4), torch.float32, Source(("w",), (6, 4)), placement={"ep": 0})

    class FourRanks:
        def sizes(self) -> dict[str, int]:
            return {"pp": 1, "dp": 1, "ep": 4, "tp": 1}

    mesh: Any = FourRanks()
    with pytest.raises(ProgramError, match=r"w \(6, 4\) cannot be cut in 4 on dimension 0"):
        spec.local_shape(mesh)
    assert ParameterSpec("w", (8, 4), torch.float32, spec.source, placement={"ep": 0}).local_shape(mesh) == (2, 4)


@pytest.mark.parametrize(
    ("names", "shape", "full"), [(("a",), (6, 2), (3, 2, 2)), (("a", "b", "c", "d"), (3,), (2, 2, 3))]
)
def test_a_source_builds_and_splits(names: tuple[str, ...], shape: tuple[int, ...], full: tuple[int, ...]) -> None:
    tensors: dict[str, Tensor] = {name: rand(*shape, seed=i) for i, name in enumerate(names)}
    source = Source(names, shape)
    built = source.build(tensors, full)
    assert built.shape == full
    back = source.split(built)
    assert all(torch.equal(back[name], tensors[name]) for name in names)
    with pytest.raises(ValueError, match="the program needs"):
        source.build({**tensors, names[-1]: rand(5)}, full)


def test_explain_shows_passes_nodes_and_segments() -> None:
    compiled = optimus.compile(ours(olmoe_config()), sequence_length=8, backend="eager")
    text = compiled.explain()
    lines = text.splitlines()
    names = ("Canonicalise", "CausalMask", "FuseSparseMoE", "FuseLoss", "WidenProducts", "ShardOptimizer")
    assert lines[1] == "pipeline  " + " -> ".join(f"{name}()" for name in names)
    rows = {line.split()[0]: line.split() for line in lines if line.startswith(("FuseSparseMoE", "layer", "head"))}
    report = compiled.program.history[2]
    assert rows["FuseSparseMoE"][1:6] == [
        str(v) for v in (2, report.added, report.removed, report.nodes_before, report.nodes_after)
    ]
    assert report.nodes_after == report.nodes_before + report.added - report.removed
    assert rows["layer"][1] == "2"
    assert "torch.ops.optimus.grouped_mlp" not in text
    assert "torch.ops.optimus.grouped_mlp" in compiled.explain(graphs=True)


def test_a_mesh_that_does_not_fit_the_job_is_refused() -> None:
    with pytest.raises(ValueError, match="needs 4 processes and this job has 1"):
        optimus.Mesh(dp=2, ep=2)
    with pytest.raises(ValueError, match="mesh dimension ep=0 must be at least 1"):
        optimus.Mesh(ep=0)
    with pytest.raises(PassError, match="1f1b on pp=2 needs at least 2 micro-batches a step and there are 1"):
        optimus.compile(ours(olmoe_config()), optimus.Mesh.abstract(pp=2), sequence_length=8)


def test_a_pipeline_needs_stages_and_no_check() -> None:
    mesh = optimus.Mesh.abstract(pp=2)
    with pytest.raises(ValueError, match="check=True runs the whole model and the mesh has pp=2: check with pp=1"):
        optimus.compile(ours(olmoe_config()), mesh, sequence_length=8, check=True)
    with pytest.raises(
        ValueError, match="sequence_parallel=True divides sequences over tp ranks and the mesh has tp=1"
    ):
        optimus.compile(ours(olmoe_config()), mesh, sequence_length=8, sequence_parallel=True)
    with pytest.raises(ValueError, match="the mesh has pp=2 and the passes leave one stage: add SplitPipeline"):
        optimus.compile(ours(olmoe_config()), mesh, sequence_length=8, passes=PassPipeline((Canonicalise(),)))
