"""Canonicalise: what goes, what stays, and that no write becomes functional while somebody still reads its storage."""

import torch
from torch import Tensor

from optimus_compiler.passes import Canonicalise, PassPipeline
from tests.passes.small import operations, rand, run, small_program

PIPELINE = PassPipeline((Canonicalise(),))


def check(function: object, *inputs: Tensor) -> list[str]:
    """Runs the pass; the program computes what it computed. Returns its operations."""
    program = small_program(function, *inputs)  # type: ignore[arg-type]
    before = run(program, *inputs)
    PIPELINE.run(program)
    for old, new in zip(before, run(program, *inputs), strict=True):
        assert torch.equal(old, new)
    return operations(program)


def test_casts_to_the_same_dtype_go_and_real_ones_stay() -> None:
    x = rand(3, 4)
    assert check(lambda x: torch.relu(x.to(torch.float32).contiguous()), x) == ["relu.default"]
    found = check(lambda x: x.to(torch.bfloat16).to(torch.bfloat16).to(torch.float32).relu(), x)
    assert found == ["to.dtype", "to.dtype", "relu.default"]


def test_contiguous_of_a_transpose_stays() -> None:
    assert check(lambda x: x.t().contiguous().relu(), rand(3, 4)) == ["t.default", "contiguous.default", "relu.default"]


def test_in_place_on_a_value_nobody_reads_later_becomes_functional() -> None:
    assert check(lambda x: x.relu().div_(2.0).neg(), rand(3)) == ["relu.default", "div.Tensor", "neg.default"]


def test_in_place_stays_while_its_storage_is_read_under_another_name() -> None:
    def view_is_read(x: Tensor) -> Tensor:
        y = x.relu()
        y[0].mul_(3.0)
        return y.sum()

    def written_through_a_view(x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[1:].copy_(x[1:])
        return y

    assert "mul_.Tensor" in check(view_is_read, rand(3, 4))
    assert "copy_.default" in check(written_through_a_view, rand(3, 4))


def test_a_write_through_one_of_several_views_is_seen() -> None:
    def chunks(x: Tensor) -> Tensor:
        y = x.relu()
        first, _ = y.chunk(2)
        first.mul_(3.0)
        return y

    def rows(x: Tensor) -> Tensor:
        y = x.relu()
        y.unbind(0)[1].zero_()
        return y

    assert "mul_.Tensor" in check(chunks, rand(4, 3))
    assert "zero_.default" in check(rows, rand(4, 3))


def test_a_copy_stays_while_something_writes_to_either_side() -> None:
    def copy_written(x: Tensor) -> Tensor:
        y = x.relu()
        z = y.to(torch.float32, copy=True)
        z.add_(1.0)
        return y + z

    def source_written(x: Tensor) -> Tensor:
        y = x.relu()
        z = y.clone()
        y.add_(1.0)
        return y + z

    assert "relu.default" in check(copy_written, rand(3))
    assert "clone.default" in check(source_written, rand(3))
    assert check(lambda x: x.relu().clone().neg(), rand(3)) == ["relu.default", "neg.default"]


def test_a_dead_write_goes_with_what_only_it_reads() -> None:
    def dead(x: Tensor) -> Tensor:
        scratch = torch.zeros_like(x)
        scratch.add_(x.exp())
        return x.neg()

    assert check(dead, rand(3)) == ["neg.default"]


def test_reads_before_the_write_do_not_matter() -> None:
    def read_before(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.relu()
        total = y.sum()
        return y.div_(total), total

    assert "div.Tensor" in check(read_before, rand(5))


def test_unchanged_when_there_is_nothing_to_do() -> None:
    program = small_program(lambda x: x.relu().exp(), rand(3))
    key = program.segments[0].key
    (report,) = PIPELINE.run(program)
    assert (report.matches, report.added, report.removed) == (0, 0, 0)
    assert program.segments[0].key == key
