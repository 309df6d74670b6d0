"""Padding gets no loss, and with document ids and positions one document's tokens never reach another's logits."""

from typing import Any

import pytest
import torch
from torch import Tensor

import optimus_compiler as optimus
from optimus_compiler.models import build, from_name
from optimus_compiler.runtime.data.labels import documents_of, labels_of

EOS = 1
TINY = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,  # attention that tells tokens apart
}
MODELS: dict[str, dict[str, Any]] = {"olmo-tiny": TINY, "olmoe-tiny": TINY | {"num_experts": 4}}
IDS = torch.tensor([[9, 8, 7, 6, EOS, 20, 21, 22, 23, 24, EOS, 30]])
SECOND = slice(5, 11)  # the document in the middle


def test_padding_has_no_label_and_the_end_of_a_document_has() -> None:
    ids = torch.tensor([[5, 6, EOS, 7, EOS, EOS, EOS], [EOS, EOS, EOS, EOS, EOS, EOS, EOS], [EOS, 5, 6, 7, 8, 9, EOS]])
    labels = labels_of(ids, EOS)
    assert labels.dtype == torch.int64
    assert labels.tolist() == [[5, 6, EOS, 7, EOS, -100, -100], [EOS] + [-100] * 6, [EOS, 5, 6, 7, 8, 9, EOS]]
    assert ids[0].tolist() == [5, 6, EOS, 7, EOS, EOS, EOS]  # the ids stay


def test_labels_are_unshifted_so_the_model_predicts_the_end_and_not_the_padding() -> None:
    torch.manual_seed(0)
    model = build(from_name("olmoe-tiny", **MODELS["olmoe-tiny"]))
    ids = torch.tensor([[5, 6, 7, EOS, EOS, EOS]])
    logits = model(input_ids=ids).logits
    expected = torch.nn.functional.cross_entropy(logits[0, :3], ids[0, 1:4])  # 6, 7 and the end; no padding
    torch.testing.assert_close(model(input_ids=ids, labels=labels_of(ids, EOS)).loss, expected)


def test_documents_and_positions_count_from_each_end() -> None:
    ids = torch.tensor([[5, 6, EOS, 7, 8, 9, EOS, 4], [EOS, 5, EOS, EOS, EOS, 6, 7, EOS], [5, 6, 7, 8, 9, 2, 3, 4]])
    document_ids, position_ids = documents_of(ids, EOS)
    assert document_ids.dtype == position_ids.dtype == torch.int64
    assert document_ids.tolist() == [[0, 0, 0, 1, 1, 1, 1, 2], [0, 1, 1, 2, 3, 4, 4, 4], [0] * 8]
    assert position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 0, 1, 0, 0, 0, 1, 2], list(range(8))]


def test_documents_equal_their_definition() -> None:
    ids = torch.randint(0, 4, (20, 33), generator=torch.Generator().manual_seed(0))
    document_ids, position_ids = documents_of(ids, EOS)
    for row, documents, positions in zip(ids.tolist(), document_ids.tolist(), position_ids.tolist(), strict=True):
        assert documents == [row[:t].count(EOS) for t in range(33)]
        assert positions == [t - documents.index(documents[t]) for t in range(33)]


class Twins:
    """The logits of a model compiled with documents kept apart, and of the same model as it is."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model = build(from_name(name, **MODELS[name]))
        names = ("input_ids", "labels", "document_ids", "position_ids")
        self.compiled = optimus.compile(self.model, inputs=names, sequence_length=IDS.shape[1], backend="eager")

    def apart(self, ids_BT: Tensor) -> Tensor:
        document_ids, position_ids = documents_of(ids_BT, EOS)
        logits = self.compiled(ids_BT, document_ids=document_ids, position_ids=position_ids).logits
        return logits.detach()[0]

    def mixed(self, ids_BT: Tensor) -> Tensor:
        return self.model(input_ids=ids_BT).logits.detach()[0]


@pytest.fixture(scope="module", params=MODELS)
def twins(request: pytest.FixtureRequest) -> Twins:
    return Twins(request.param)


@pytest.mark.parametrize("changed", range(4))
def test_a_document_does_not_see_a_change_in_the_one_before(twins: Twins, changed: int) -> None:
    other = IDS.clone()
    other[0, changed] = 40
    apart = (twins.apart(other) - twins.apart(IDS)).abs().amax(-1)
    mixed = (twins.mixed(other) - twins.mixed(IDS)).abs().amax(-1)
    # experts multiply the rows of all documents at once, and rounding differs with the number of rows
    assert (apart[SECOND] <= (1e-5 if hasattr(twins.model.config, "num_experts") else 0)).all()
    assert (apart[changed:5] > 1e-3).all()
    assert (mixed[changed:] > 1e-3).all()  # without the mask every later token sees the change


def test_a_document_computes_what_it_computes_alone(twins: Twins) -> None:
    alone = twins.mixed(IDS[:, SECOND])
    torch.testing.assert_close(twins.apart(IDS)[SECOND], alone, rtol=0, atol=1e-5)
    assert (twins.mixed(IDS)[SECOND] - alone).abs().max() > 1e-2
