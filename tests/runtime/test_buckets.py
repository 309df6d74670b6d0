"""Buckets: alignment, views that persist, padding that stays zero, one bucket for a tied weight."""

import torch

import optimus_compiler as optimus
from optimus_compiler.runtime.buckets import ALIGNMENT
from tests.models.twins import olmo_config, olmoe_config, ours
from tests.parity import random_ids


def test_parameters_and_gradients_are_views_that_persist() -> None:
    ids, labels = random_ids(97, 1, 8)
    compiled = optimus.compile(ours(olmoe_config()), sequence_length=8, backend="eager")
    assert [bucket.name for bucket in compiled.buckets] == [
        "embed+layer0.float32",
        "layer1.float32",
        "head.float32",
    ]
    names = [entry.name for bucket in compiled.buckets for entry in bucket.entries]
    assert sorted(names) == sorted(name for name, _ in compiled.named_parameters())
    assert len(set(names)) == len(names)
    for _ in range(2):
        compiled.train_step(ids, labels)
    for bucket in compiled.buckets:
        covered = torch.zeros_like(bucket.weights, dtype=torch.bool)
        for entry in bucket.entries:
            start = entry.offset * bucket.weights.element_size()
            assert start % ALIGNMENT == 0
            assert entry.parameter.data_ptr() == bucket.weights.data_ptr() + start
            assert entry.parameter.grad is not None
            assert entry.parameter.grad.data_ptr() == bucket.gradients.data_ptr() + start
            assert not entry.view(covered).any()  # no two parameters overlap
            entry.view(covered).fill_(True)
        assert not bucket.weights[~covered].any()
        assert not bucket.gradients[~covered].any()
        assert bucket.gradients.any()


def test_a_tied_weight_is_in_one_bucket() -> None:
    compiled = optimus.compile(ours(olmo_config(tie_word_embeddings=True)), sequence_length=8, backend="eager")
    holders = [b.name for b in compiled.buckets if any(e.name == "model.embed_tokens.weight" for e in b.entries)]
    assert holders == ["embed+layer0.float32"]
