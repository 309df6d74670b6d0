"""CausalMask: causal constants become a flag, masks from inputs stay, other constants are refused."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from optimus_compiler.passes import CausalMask, PassError, PassPipeline
from tests.passes.small import operations, rand, run, small_program

S = 6
Q, K, V = (rand(2, 3, S, 4, seed=i) for i in range(3))
PIPELINE = PassPipeline((CausalMask(),))


def causal() -> Tensor:
    return torch.arange(S)[:, None] >= torch.arange(S)


def test_a_causal_mask_made_from_nothing_becomes_is_causal() -> None:
    program = small_program(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=causal(), scale=0.3), Q, K, V
    )
    before = run(program, Q, K, V)[0]
    (report,) = PIPELINE.run(program)
    assert report.matches == 1
    assert operations(program) == ["scaled_dot_product_attention.default"]
    node = next(n for n in program.segments[0].graph.graph.nodes if n.op == "call_function")
    assert node.args[3:] == (None, 0.0, True)
    assert node.kwargs == {"scale": 0.3}
    torch.testing.assert_close(run(program, Q, K, V)[0], before)


def test_an_additive_causal_mask_becomes_is_causal() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(S, S).masked_fill(~causal(), float("-inf"))
        return F.scaled_dot_product_attention(q, k, v, mask)

    program = small_program(function, Q, K, V)
    before = run(program, Q, K, V)[0]
    assert PIPELINE.run(program)[0].matches == 1
    torch.testing.assert_close(run(program, Q, K, V)[0], before)


def test_a_constant_window_is_refused() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        distance = torch.arange(S)[:, None] - torch.arange(S)
        return F.scaled_dot_product_attention(q, k, v, (distance >= 0) & (distance < 3))

    program = small_program(function, Q, K, V)
    with pytest.raises(PassError, match="a constant that is not causal"):
        PIPELINE.run(program)


def test_a_mask_that_only_discourages_is_refused() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, torch.full((S, S), -1.0).triu(1))

    with pytest.raises(PassError, match="a constant that is not causal"):
        PIPELINE.run(small_program(function, Q, K, V))


def test_attention_that_sees_later_tokens_is_refused() -> None:
    """Padding on the right would change what comes before it."""
    program = small_program(F.scaled_dot_product_attention, Q, K, V)
    program.sequence_length = S
    with pytest.raises(PassError, match="sees later tokens"):
        PIPELINE.run(program)


def test_a_mask_from_an_input_stays() -> None:
    program = small_program(F.scaled_dot_product_attention, Q, K, V, causal()[None, None])
    key = program.segments[0].key
    (report,) = PIPELINE.run(program)
    assert report.matches == 0
    assert report.notes == ("0 masks became is_causal, 1 come from a declared input",)
    assert program.segments[0].key == key


def test_no_mask_stays_no_mask() -> None:
    program = small_program(F.scaled_dot_product_attention, Q, K, V)
    before = run(program, Q, K, V)[0]
    assert PIPELINE.run(program)[0].matches == 0
    assert torch.equal(run(program, Q, K, V)[0], before)
