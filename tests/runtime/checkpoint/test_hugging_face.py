"""Hugging Face folders out and in: the same logits in transformers, published names, nothing transposed (case 25)."""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from optimus_compiler.compiled import CompiledModel
from optimus_compiler.config import KeepPersistent, load_config
from optimus_compiler.mesh import Mesh
from optimus_compiler.models import build, from_hf, from_name
from optimus_compiler.models.published import published_shapes
from optimus_compiler.program import ParameterSpec, Source
from optimus_compiler.runtime.checkpoint import shards
from optimus_compiler.runtime.checkpoint.export import export
from optimus_compiler.runtime.checkpoint.folder import CheckpointFolder, open_checkpoint
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError, StoredParameter
from optimus_compiler.runtime.checkpoint.shards import part_of_parameter
from optimus_compiler.runtime.checkpoint.write import write_checkpoint
from optimus_compiler.runtime.data.dataset import PreparedData
from optimus_compiler.runtime.run import open_run
from optimus_compiler.runtime.trainer import train
from tests.runtime.checkpoint.small_run import plain_manifest, progress
from tests.tiny_run import CONTEXT_LENGTH

SIZES = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
OLMOE = {**SIZES, "intermediate_size": 24, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("olmoe", {**OLMOE, "rope_theta": 500.0, "rms_norm_eps": 1e-3}),
    "olmoe with square matrices": ("olmoe", {**OLMOE, "intermediate_size": 32, "num_key_value_heads": 4}),
    "olmoe, gate and up square": ("olmoe", {**OLMOE, "intermediate_size": 16}),
    "olmoe, tied": ("olmoe", {**OLMOE, "tie_word_embeddings": True, "norm_topk_prob": True, "clip_qkv": 0.5}),
    "olmo": ("olmo", {**SIZES, "intermediate_size": 48, "attention_bias": False}),
}


def transformers_folder(kind: str, folder: Path) -> Any:
    """A transformers model with random weights, saved to a folder."""
    name, sizes = MODELS[kind]
    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **sizes, max_position_embeddings=64, pad_token_id=None, eos_token_id=0)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 0.5 if parameter.dim() == 1 else 0, 0.2)  # norms differ from one too
    model.save_pretrained(folder)
    return model.eval()


def run_from(tiny: Path, output: Path, folder: Path, *overrides: str) -> tuple[CompiledModel, Path]:
    """One step from the weights of a folder, with a learning rate of 0; the model and its checkpoint."""
    settings = [f"data.path={tiny / 'data'}", f"model.name={folder}", f"model.init={folder}", "train.steps=1"]
    overrides = ("model.overrides={}", "optimizer.lr=0", "optimizer.min_lr=0", *overrides)
    config = load_config(tiny / "tiny.toml", [*settings, *overrides])
    config = config.model_copy(update={"model": config.model.model_copy(update={"overrides": {}})})
    return train(open_run(config, output)), output / "checkpoints" / "step-1"


def export_to(checkpoint: Path, folder: Path, file_bytes: int = 10**9) -> Path:
    export(
        open_checkpoint(checkpoint),
        folder,
        tokenizer=None,
        eos=None,
        file_bytes=file_bytes,
        progress=lambda stage, done, total: None,
    )
    return folder


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        out: Tensor = model(ids).logits.float()
    return out


@pytest.fixture(scope="module")
def ids() -> Tensor:
    return torch.randint(0, 300, (2, CONTEXT_LENGTH), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("kind", MODELS)
def test_logits_are_equal_both_ways(kind: str, tiny: Path, tmp_path: Path, ids: Tensor) -> None:
    theirs = transformers_folder(kind, tmp_path / "theirs")
    compiled, checkpoint = run_from(tiny, tmp_path / "run", tmp_path / "theirs")
    expected = logits(theirs, ids)
    torch.testing.assert_close(logits(compiled, ids), expected, rtol=1e-5, atol=1e-6)

    export_to(checkpoint, tmp_path / "ours")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(loaded) is type(theirs)
    assert loaded.dtype == torch.float32
    assert torch.equal(logits(loaded.eval(), ids), expected)
    saved, ours = tensors_in(tmp_path / "theirs"), tensors_in(tmp_path / "ours")
    assert saved.keys() == ours.keys()
    assert all(torch.equal(saved[name], ours[name]) for name in saved)


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def test_bf16_weights_stay_what_they_are(tiny: Path, tmp_path: Path, ids: Tensor) -> None:
    transformers_folder("olmoe", tmp_path / "theirs").bfloat16().save_pretrained(tmp_path / "bf16")
    _, checkpoint = run_from(tiny, tmp_path / "run", tmp_path / "bf16", "train.precision=bf16")
    export_to(checkpoint, tmp_path / "ours")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "ours").dtype == torch.bfloat16
    saved, ours = tensors_in(tmp_path / "bf16"), tensors_in(tmp_path / "ours")
    assert all(torch.equal(saved[name], ours[name]) for name in saved)
    assert {tensor.dtype for tensor in ours.values()} == {torch.bfloat16}


def test_masters_of_a_bf16_run_are_the_fp32_values_of_the_folder(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    transformers_folder("olmoe", tmp_path / "theirs")
    _, checkpoint = run_from(tiny, tmp_path / "run", tmp_path / "theirs", "train.precision=bf16")
    # a step with a learning rate of 0 leaves masters as they are: an fp32 run from this checkpoint has them as weights
    compiled, _ = run_from(tiny, tmp_path / "fp32", tmp_path / "theirs", f"model.init={checkpoint}")
    saved = tensors_in(tmp_path / "theirs")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    stacked = compiled.full_state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(stacked[3, saved[name].shape[0] :], saved[name])


def test_stacked_names_and_several_files_are_read(tiny: Path, tmp_path: Path) -> None:
    """transformers 5 in memory: gate_up_proj [experts, 2 * width, hidden]."""
    model = transformers_folder("olmoe", tmp_path / "theirs")
    stacked = tmp_path / "stacked"
    stacked.mkdir()
    shutil.copy(tmp_path / "theirs" / "config.json", stacked)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in state
    first, second = dict(list(state.items())[::2]), dict(list(state.items())[1::2])
    save_file(first, stacked / "a.safetensors")
    save_file(second, stacked / "b.safetensors")
    where = {**dict.fromkeys(first, "a.safetensors"), **dict.fromkeys(second, "b.safetensors")}
    (stacked / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    from_stacked, _ = run_from(tiny, tmp_path / "run", stacked)
    found = from_stacked.full_state_dict()
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


def test_files_are_divided_by_size(tiny: Path, tmp_path: Path, ids: Tensor) -> None:
    theirs = transformers_folder("olmoe", tmp_path / "theirs")
    _, checkpoint = run_from(tiny, tmp_path / "run", tmp_path / "theirs")
    folder = export_to(checkpoint, tmp_path / "ours", file_bytes=40_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = {file.name: sum(t.nbytes for t in load_file(file).values()) for file in folder.glob("*.safetensors")}
    assert len(sizes) > 3
    assert set(index["weight_map"].values()) == sizes.keys()
    assert index["metadata"]["total_size"] == sum(sizes.values())
    assert all(size <= 40_000 or len(load_file(folder / name)) == 1 for name, size in sizes.items())
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(folder).eval(), ids), logits(theirs, ids))
    again, _ = run_from(tiny, tmp_path / "again", folder)  # and it is a folder to start from
    assert torch.equal(again.full_state_dict()["lm_head.weight"], theirs.state_dict()["lm_head.weight"])


def test_the_names_are_those_of_the_published_olmoe() -> None:
    with torch.device("meta"):
        model = build(from_name("mula-7b-a1b"))
    published: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        published |= published_shapes(name, parameter.shape)
    assert len(published) == 16 * (64 * 3 + 9) + 3
    assert sum(torch.Size(shape).numel() for shape in published.values()) * 2 == 13_838_323_712
    assert published["model.layers.15.mlp.experts.63.gate_proj.weight"] == (1024, 2048)
    assert published["model.layers.0.mlp.experts.0.up_proj.weight"] == (1024, 2048)
    assert published["model.layers.7.mlp.experts.9.down_proj.weight"] == (2048, 1024)
    assert published["model.layers.3.mlp.gate.weight"] == (64, 2048)
    assert published["model.layers.3.self_attn.q_norm.weight"] == (2048,)
    assert published["lm_head.weight"] == published["model.embed_tokens.weight"] == (50304, 2048)


def test_the_tokenizer_goes_along(tiny: Path, tmp_path: Path) -> None:
    transformers_folder("olmoe", tmp_path / "theirs")
    _, checkpoint = run_from(tiny, tmp_path / "run", tmp_path / "theirs")
    export(
        open_checkpoint(checkpoint),
        tmp_path / "ours",
        tokenizer=tiny / "tokenizer.json",
        eos="<|endoftext|>",
        file_bytes=10**9,
        progress=lambda stage, done, total: None,
    )
    data = PreparedData.open(tiny / "data")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "ours")
    text = "def f(x): return 1"
    assert tokenizer(text)["input_ids"] == data.tokenizer().encode(text).ids
    assert tokenizer.eos_token_id == data.manifest.eos_id
    assert from_hf(tmp_path / "ours").eos_token_id == data.manifest.eos_id


def change(folder: Path, tensors: Mapping[str, Tensor | None]) -> None:
    held = {**load_file(folder / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in held.items() if tensor is not None}, folder / "model.safetensors")


GATE = "model.layers.0.mlp.experts.1.gate_proj.weight"


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda folder: change(folder, {GATE: None}), rf"holds no {GATE}, which the model"),
        (
            lambda folder: change(folder, {GATE: torch.zeros(32, 24)}),
            rf"{GATE} as \[32, 24\]; the model needs \[24, 32\]",
        ),
        (
            lambda folder: change(folder, {"model.layers.2.mlp.gate.weight": torch.zeros(1)}),
            r"holds model.layers.2.mlp",
        ),
        (lambda folder: (folder / "model.safetensors").unlink(), r"neither a checkpoint nor a Hugging Face folder"),
        (
            lambda folder: (folder / "model.safetensors").write_bytes(b"{}" * 20),
            r"model.safetensors could not be opened",
        ),
        (
            lambda folder: (folder / "model.safetensors.index.json").write_text("[]"),
            r"index.json is no index of weights",
        ),
    ],
)
def test_a_folder_that_does_not_fit_is_refused_before_anything_is_written(
    tiny: Path, tmp_path: Path, damage: Any, sentence: str
) -> None:
    transformers_folder("olmoe", tmp_path / "theirs")
    damage(tmp_path / "theirs")
    with pytest.raises(CheckpointError, match=sentence) as caught:
        run_from(tiny, tmp_path / "run", tmp_path / "theirs")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_another_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    transformers_folder("olmoe", tmp_path / "theirs")
    _, checkpoint = run_from(tiny, tmp_path / "run", tmp_path / "theirs")
    transformers_folder("olmoe with square matrices", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"is a model with intermediate_size = 24, and this .* has 32"):
        run_from(tiny, tmp_path / "second", tmp_path / "other", f"model.init={checkpoint}")


def test_an_export_that_fails_leaves_nothing(tiny: Path, tmp_path: Path) -> None:
    transformers_folder("olmoe", tmp_path / "theirs")
    _, checkpoint = run_from(tiny, tmp_path / "run", tmp_path / "theirs")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(CheckpointError, match=r"full exists and is not empty: name another folder"):
        export_to(checkpoint, tmp_path / "full")
    (checkpoint / "__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"could not be read"):
        export_to(checkpoint, tmp_path / "ours")
    assert not [path for path in tmp_path.iterdir() if "ours" in path.name]


def resident(key: str) -> int:
    """Bytes that this process has in memory ("VmRSS"), or had at most since the last reset ("VmHWM")."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def test_export_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is that of the largest tensor and of the stored boxes it is read from, not of the model."""
    monkeypatch.setattr(shards, "LARGEST_BOX", 2**20)
    shapes = {"model.layers.0.mlp.experts.gate_up_proj": (8, 2, 1024, 2048), "lm_head.weight": (2048, 2048)}
    specs = {n: ParameterSpec(n, shape, torch.float32, Source((n,), shape)) for n, shape in shapes.items()}
    table = {n: StoredParameter(shape=s, dtype="float32", placement={}, stages=(0,)) for n, s in shapes.items()}
    parts = {n: part_of_parameter(spec, Mesh.abstract(), torch.randn(prod(spec.shape)), 0) for n, spec in specs.items()}
    describe = partial(plain_manifest, "model", progress(1), parameters=table)
    checkpoint = write_checkpoint(CheckpointFolder(tmp_path), "model", 1, parts, describe, KeepPersistent(), None)
    total, largest = sum(4 * prod(shape) for shape in shapes.values()), 4 * prod(shapes["lm_head.weight"])
    expected = parts["lm_head.weight"].boxes[0].values[0, :8].clone()
    del parts
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    export_to(checkpoint, tmp_path / "out")
    assert resident("VmHWM") - before < largest + 8 * 4 * shards.LARGEST_BOX < total / 2
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert len(exported) == 17
    assert torch.equal(exported["lm_head.weight"][0, :8], expected)
