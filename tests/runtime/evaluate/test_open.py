"""What is opened computes what the model itself does: checkpoints, exported folders, transformers' folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import optimus_compiler as optimus
from optimus_compiler.cli.main import main
from optimus_compiler.config import load_config
from optimus_compiler.runtime.evaluate.open import open_model
from optimus_compiler.runtime.run import open_run
from optimus_compiler.runtime.trainer import train
from tests.runtime.evaluate.conftest import VOCABULARY


def logits_of(path: Path) -> torch.Tensor:
    ids = torch.arange(24).reshape(2, 12) % VOCABULARY
    with torch.no_grad():
        return open_model(path, optimus.Mesh()).model.module(ids).logits


def transformers_logits(path: Path) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto")(torch.arange(24).reshape(2, 12)).logits


def test_a_transformers_olmoe_gives_transformers_logits(olmoe_folder: Path) -> None:
    torch.testing.assert_close(logits_of(olmoe_folder), transformers_logits(olmoe_folder), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        ["train.precision=bf16"],
        ["model.name=olmo-tiny", "model.overrides={vocab_size=300, num_hidden_layers=2, tie_word_embeddings=true}"],
    ],
)
def test_a_checkpoint_gives_what_its_exported_folder_gives_in_transformers(
    tiny: Path, tmp_path: Path, settings: list[str]
) -> None:
    config = load_config(tiny / "tiny.toml", [f"data.path={tiny / 'data'}", "train.steps=2", *settings])
    train(open_run(config, tmp_path / "run"))
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    ours = logits_of(tmp_path / "run")
    torch.testing.assert_close(ours, logits_of(tmp_path / "exported"), rtol=0, atol=0)
    tolerance = 2e-2 if "bf16" in settings[0] else 1e-5
    torch.testing.assert_close(ours, transformers_logits(tmp_path / "exported"), rtol=tolerance, atol=tolerance)


def test_any_other_model_is_run_by_transformers(olmoe_folder: Path, tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((olmoe_folder / "tokenizer.json").read_bytes())
    assert torch.equal(logits_of(tmp_path), transformers_logits(tmp_path))


def test_a_models_context_length_has_many_names(olmoe_folder: Path, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCABULARY, n_positions=24, n_embd=16, n_layer=1, n_head=2, eos_token_id=0)
    ).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((olmoe_folder / "tokenizer.json").read_bytes())
    assert open_model(tmp_path, optimus.Mesh()).model.max_length == 24


def test_what_cannot_be_opened_is_named(olmoe_folder: Path, tmp_path: Path) -> None:
    def refusal(path: Path, tokenizer: Path | None = None) -> str:
        with pytest.raises(ValueError) as caught:
            open_model(path, optimus.Mesh(), tokenizer=tokenizer)
        return str(caught.value)

    assert "does not exist: name a checkpoint, a run directory or a Hugging Face folder" in refusal(tmp_path / "none")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{")
    assert "config.json is not JSON" in refusal(folder)
    settings = json.loads((olmoe_folder / "config.json").read_text())
    tokenizer = olmoe_folder / "tokenizer.json"
    for changed, sentence in (
        ({"eos_token_id": []}, f"{folder} names no eos_token_id"),
        ({"eos_token_id": None}, f"{folder} names no eos_token_id"),
    ):
        (folder / "config.json").write_text(json.dumps(settings | changed))
        assert sentence in refusal(folder, tokenizer)
    (folder / "config.json").write_text("[1]")
    assert "holds a list, not an object of settings" in refusal(folder)
    (folder / "config.json").write_text(json.dumps(settings | {"dtype": "bfloat"}))
    (folder / "model.safetensors").write_bytes((olmoe_folder / "model.safetensors").read_bytes())
    assert f"{folder} names 'bfloat' as its dtype" in refusal(folder, tokenizer)
    (folder / "model.safetensors").unlink()
    (folder / "config.json").write_text(json.dumps(settings))
    assert "tokenizer.json does not exist: pass --tokenizer FILE" in refusal(folder)
    assert "neither a checkpoint nor a Hugging Face folder" in refusal(folder, olmoe_folder / "tokenizer.json")
    larger = tmp_path / "larger.json"
    from tests.byte_level import train_byte_level

    text = " ".join(f"word{i} of{i}" for i in range(300))
    train_byte_level([text], VOCABULARY + 50, ["<|endoftext|>"]).save(str(larger))
    assert f"tokens and the model of {olmoe_folder} a vocabulary of {VOCABULARY}" in refusal(olmoe_folder, larger)
