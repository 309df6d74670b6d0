"""A checkpoint of any layout is loaded by any other: weights, masters and moments bit by bit (cases 22 and 24)."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import optimus_compiler as optimus
from optimus_compiler.config import CheckpointSection
from optimus_compiler.mesh import DIMENSIONS
from optimus_compiler.runtime.checkpoint import shards
from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder
from optimus_compiler.runtime.checkpoint.load import StoredTensors, load_masters, load_moments, load_weights
from optimus_compiler.runtime.checkpoint.manifest import CheckpointManifest
from optimus_compiler.runtime.checkpoint.storage import CheckpointReader
from optimus_compiler.runtime.collectives import Transfer
from tests.layouts import MICRO_BATCHES, B, S, batches, own_rows, small_model
from tests.peak_memory import peak_of
from tests.ranks import Ranks
from tests.runtime.checkpoint.small_run import progress, saver


@dataclass(frozen=True)
class Layout:
    """Sizes of the mesh, options of compile and of the optimizer."""

    mesh: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    scattered: bool = False

    @property
    def ranks(self) -> int:
        size = 1
        for each in self.mesh.values():
            size *= each
        return size


INTERLEAVED = {"schedule": "interleaved-1f1b", "virtual_stages": 2}
LAYOUTS = {
    "one process": Layout({}),
    "dp2 ep2 epso": Layout({"dp": 2, "ep": 2}, scattered=True),
    "ep4 so": Layout({"ep": 4}, settings={"sharding": "so"}),
    "dp2 tp2 zero2": Layout({"dp": 2, "tp": 2}, {"sequence_parallel": True}, {"zero": 2}, scattered=True),
    "pp2 dp2 virtual": Layout({"pp": 2, "dp": 2}, INTERLEAVED),
    "pp2 ep2 none": Layout({"pp": 2, "ep": 2}, settings={"sharding": "none"}),
}

State = dict[str, dict[str, Tensor]]


def trained(layout: Layout, steps: int) -> tuple[optimus.CompiledModel, optimus.ShardedAdamW]:
    """A small OLMoE in bf16 with tied embeddings, after some steps."""
    mesh = optimus.Mesh(**layout.mesh)  # type: ignore[arg-type]
    compiled = optimus.compile(
        small_model("tied-olmoe").bfloat16(),
        mesh,
        sequence_length=S,
        micro_batch_size=B,
        micro_batches=MICRO_BATCHES // mesh.size_of("dp", "ep"),
        backend="eager",
        seed=3,
        **layout.options,
    )
    optimizer = optimus.ShardedAdamW(compiled, lr=1e-2, **layout.settings)
    for ids, labels in list(zip(*batches(), strict=True))[:steps]:
        compiled.train_step(own_rows(ids, mesh), own_rows(labels, mesh))
        optimizer.step()
        optimizer.zero_grad()
    return compiled, optimizer


def whole_state(compiled: optimus.CompiledModel, optimizer: optimus.ShardedAdamW) -> State:
    """Weights, masters and moments as tensors of the model."""
    return {"weight": compiled.full_state_dict(), **optimizer.full_state()}


def save(name: str, run: Path) -> State:
    """Trains under a layout and saves; what was saved."""
    layout = LAYOUTS[name]
    compiled, optimizer = trained(layout, steps=2)
    settings = CheckpointSection(scattered=layout.scattered)
    small_boxes = patch.object(shards, "LARGEST_BOX", 700)  # several a parameter, as in large models
    with small_boxes, saver(CheckpointFolder(run), compiled, optimizer, settings) as saving:
        saving.save(["full", "model"], progress(2))
    return whole_state(compiled, optimizer)


def load(name: str, saved: dict[str, tuple[Path, State]]) -> dict[str, list[str]]:
    """Loads each checkpoint under a layout, over NaN; the tensors that differ from what was saved."""
    compiled, optimizer = trained(LAYOUTS[name], steps=0)
    differing: dict[str, list[str]] = {}
    for index, (other, (run, expected)) in enumerate(saved.items()):
        for bucket in compiled.buckets:
            for entry in bucket.entries:
                entry.view(bucket.weights).fill_(torch.nan)
        for state in optimizer.state.values():
            for tensor in state.values():
                tensor.fill_(torch.nan)
        stored = StoredTensors(run / "checkpoints" / "step-2")
        transfer: Transfer = "broadcast" if index % 2 else "all_reduce"
        load_weights(compiled, stored, transfer)
        load_masters(compiled, optimizer, stored)
        load_moments(compiled, optimizer, stored)
        found = whole_state(compiled, optimizer)
        assert found.keys() == expected.keys()
        differing[other] = [
            f"{key} of {tensor}"
            for key, tensors in expected.items()
            for tensor in tensors
            if not torch.equal(found[key][tensor], tensors[tensor])
        ]
    return differing


@pytest.fixture(scope="module")
def saved(ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, State]]:
    """By layout: a run directory with a checkpoint, and the state it was made of."""
    made = {}
    for name, layout in LAYOUTS.items():
        run = tmp_path_factory.mktemp("run")
        made[name] = (run, ranks.run(layout.ranks, save, name, run)[0])
    return made


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_loads_every_other(name: str, saved: dict[str, tuple[Path, State]], ranks: Ranks) -> None:
    others = {other: made for other, made in saved.items() if other != name}
    assert {"weight", "master", "exp_avg", "exp_avg_sq"} == next(iter(others.values()))[1].keys()
    for differing in ranks.run(LAYOUTS[name].ranks, load, name, others):
        assert differing == {other: [] for other in others}


def peaks_of_loading(run: Path) -> tuple[int, dict[str, int]]:
    """Bytes of the largest bucket, and what loading the weights takes beside the model, by the way they travel."""
    compiled, _ = trained(LAYOUTS["dp2 ep2 epso"], steps=0)
    stored = StoredTensors(run / "checkpoints" / "step-2")
    stored.shapes()
    peaks = {
        "broadcast": peak_of(lambda: load_weights(compiled, stored, "broadcast")),
        "all_reduce": peak_of(lambda: load_weights(compiled, stored, "all_reduce")),
    }
    return max(bucket.weights.nbytes for bucket in compiled.buckets), peaks


def test_loading_takes_no_more_than_a_bucket(saved: dict[str, tuple[Path, State]], ranks: Ranks) -> None:
    results = ranks.run(4, peaks_of_loading, saved["one process"][0])
    for bucket, peaks in results:
        assert all(peak <= bucket for peak in peaks.values()), (bucket, peaks)
    readers = [rank for rank, (_, peaks) in enumerate(results) if peaks["broadcast"] > 1000]
    assert readers == [0, 3]  # one dp index reads each shard, and the other gets it in place


def written_by(checkpoint: Path) -> dict[int, int]:
    """Bytes of tensors that each rank wrote, by the checkpoint's own metadata."""
    metadata = CheckpointReader(checkpoint).read_metadata()
    written: dict[int, int] = {}
    for index, where in metadata.storage_data.items():
        stored: Any = metadata.state_dict_metadata[index.fqn]
        chunk = next(chunk for chunk in stored.chunks if chunk.offsets == index.offset)
        rank = int(where.relative_path.split("_")[2])
        written[rank] = written.get(rank, 0) + chunk.sizes.numel() * stored.properties.dtype.itemsize
    return written


def test_writers_bytes_are_even(saved: dict[str, tuple[Path, State]]) -> None:
    """DP-scattered: the bytes of any two writers differ by one model-parallel shard of the weights at most."""
    run, state = saved["dp2 ep2 epso"]
    weights = sum(t.nbytes for n, t in state["weight"].items() if n != "lm_head.weight")  # it is the embedding
    model = written_by(run / "checkpoints" / "model-2")
    assert model.keys() == {0, 3}  # shard m = 0 by dp index 0, and shard 1 by dp index 1
    assert sum(model.values()) == weights
    assert abs(model[0] - model[3]) <= 0.02 * weights  # padding
    full = written_by(run / "checkpoints" / "step-2")
    assert sum(full.values()) == weights * 7  # 2 bytes of weights, 12 of state
    assert max(full.values()) - min(full.values()) <= 1.05 * max(model.values())


def test_without_scattering_the_first_replica_writes_the_weights(saved: dict[str, tuple[Path, State]]) -> None:
    run, _ = saved["pp2 dp2 virtual"]
    manifest = CheckpointManifest.read(run / "checkpoints" / "model-2")
    assert {name for name in manifest.files if name.endswith("distcp")} == {"__0_0.distcp", "__2_0.distcp"}


def test_the_manifest_records_mesh_and_placements(saved: dict[str, tuple[Path, State]]) -> None:
    run, _ = saved["dp2 tp2 zero2"]
    manifest = CheckpointManifest.read(run / "checkpoints" / "step-2")
    assert manifest.mesh == dict(zip(DIMENSIONS, (1, 2, 1, 2), strict=True))
    assert manifest.parameters["model.layers.0.mlp.experts.gate_up_proj"].placement == {"tp": 2}
    assert manifest.parameters["model.layers.0.mlp.experts.gate_up_proj"].shape == (8, 2, 16, 32)
