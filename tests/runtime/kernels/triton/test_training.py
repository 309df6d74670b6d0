"""A one-layer OLMoE compiled with kernels="triton", two optimizer steps beside the unmodified module."""

import copy

import pytest
import torch

import optimus_compiler as optimus
from tests.layouts import ADAMW, CLIP
from tests.models.twins import olmoe_config, ours, relative_error
from tests.parity import TOLERANCE, compile_for, reference_step, worst_gradient


def test_two_steps_equal_the_module() -> None:
    model = ours(olmoe_config(vocab_size=64, hidden_size=32, intermediate_size=16, num_hidden_layers=1, num_experts=8))
    reference = copy.deepcopy(model)
    ids = torch.randint(0, 64, (2, 16))
    labels = ids.clone()
    labels[:, :3] = -100
    compiled = compile_for(model, ids, kernels="triton")
    optimizer = optimus.ShardedAdamW(compiled, clip_norm=CLIP, **ADAMW)
    expected_optimizer = torch.optim.AdamW(reference.parameters(), **ADAMW)
    for _ in range(2):
        expected = reference_step(reference, ids, labels)
        out = compiled(ids, labels)
        out.loss.backward()
        assert relative_error(out.loss, expected.loss) < TOLERANCE
        error, name = worst_gradient(compiled, reference)
        assert error < TOLERANCE, name
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), CLIP)
        assert float(optimizer.step()) == pytest.approx(float(norm), rel=TOLERANCE)
        optimizer.zero_grad()
        expected_optimizer.step()
    weights = compiled.full_state_dict()
    for name, weight in reference.named_parameters():
        assert relative_error(weights[name], weight) < TOLERANCE, name
