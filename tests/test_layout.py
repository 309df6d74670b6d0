"""Layouts that a model cannot have are refused from the configuration, before any process is connected."""

from pathlib import Path

import pytest
import torch.distributed as dist

from optimus_compiler.config import ConfigError, load_config
from optimus_compiler.layout import check_layout
from optimus_compiler.runtime.run import load_model_config, open_run


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["mesh.ep=3"], "mesh.ep = 3 does not divide the model's 8 experts: change one of them"),
        (["mesh.tp=8"], "mesh.tp = 8 does not divide the model's 4 attention heads"),
        (["mesh.tp=4", "model.overrides.num_key_value_heads=2"], "does not divide the model's 2 key-value heads"),
        (["mesh.tp=4", "model.overrides.intermediate_size=66"], "does not divide the model's 66 columns of an expert"),
        (["mesh.tp=4", "model.overrides.vocab_size=50306"], "does not divide the model's 50306 words of the vocab"),
        (["mesh.sequence_parallel=true"], "mesh.sequence_parallel needs mesh.tp = 2 or more"),
        (["mesh.pp=4", "train.global_batch_size=2"], r"\[pipeline\]: 1f1b on pp=4 needs at least 4 micro-batches"),
        (["mesh.pp=2", "pipeline.virtual_stages=2"], r"\[pipeline\]: 1f1b runs one stage a rank"),
        (["mesh.pp=7", "pipeline.schedule=gpipe"], "7 stages are more than the embedding, 4 layers and"),
        (["mesh.pp=2", "pipeline.stage_boundaries=[5]"], r"= \[5\] must be 1 rising layer numbers from 1 to 4"),
        (["mesh.pp=3", "train.global_batch_size=6", "pipeline.stage_boundaries=[3, 2]"], "must be 2 rising layer"),
        (['activation_checkpointing.budget="lots"'], "memory_budget='lots' is no size: write a number and a unit"),
    ],
)  # fmt: skip
def test_impossible_layouts_are_refused_before_processes_connect(
    tiny: Path, tmp_path: Path, overrides: list[str], sentence: str
) -> None:
    """In one process, where the mesh itself would be refused next."""
    config = load_config(tiny / "tiny.toml", ["model.name=olmoe-tiny", "model.overrides={}", *overrides])
    with pytest.raises(ConfigError, match=sentence):
        check_layout(config, load_model_config(config.model))
    with pytest.raises(ConfigError, match=sentence):
        open_run(config, tmp_path / "run")
    assert not dist.is_initialized()
    assert not (tmp_path / "run").exists()


def test_bundled_layouts_are_possible() -> None:
    for name in ("mula-1b", "mula-7b-a1b", "mula-20b-a2b", "mula-100b-a7b", "mula-220b-a10b"):
        config = load_config(name)
        check_layout(config, load_model_config(config.model))
