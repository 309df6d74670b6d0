"""Opens what is to be evaluated: a checkpoint of a run, or a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import nn

from optimus_compiler.mesh import Mesh
from optimus_compiler.models import ModelConfig, build, from_hf
from optimus_compiler.models.config import read_config
from optimus_compiler.models.olmoe import OlmoeExperts
from optimus_compiler.models.published import GATE_UP
from optimus_compiler.runtime.checkpoint.find import fault_of, open_newest
from optimus_compiler.runtime.checkpoint.hugging_face import HuggingFaceWeights
from optimus_compiler.runtime.checkpoint.load import StoredTensors, WeightSource
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
from optimus_compiler.runtime.checkpoint.shards import Box, PartOfParameter
from optimus_compiler.runtime.checkpoint.tokenizer import tokenizer_of
from optimus_compiler.runtime.collectives import together
from optimus_compiler.runtime.evaluate.encode import Encode, encoder
from optimus_compiler.runtime.evaluate.models import PlainModel
from optimus_compiler.runtime.kernels import moe

CONFIG, TOKENIZER = "config.json", "tokenizer.json"


@dataclass(frozen=True)
class Subject:
    """A model on this process's device, its tokenizer, the token that ends a text, and where it was found."""

    model: PlainModel
    tokenize: Encode
    detokenize: Callable[[list[int]], str]
    eos_id: int
    source: Path


def open_model(
    path: Path, mesh: Mesh, *, tokenizer: Path | None = None, say: Callable[[str], None] = lambda sentence: None
) -> Subject:
    """The model of a checkpoint, of the newest whole one of a run, or of a Hugging Face folder; whole on every rank.

    tokenizer: a tokenizer.json in place of that of the run's data, or of the folder. OLMo and OLMoE are run by our own
    modules, their experts by the fused kernels; any other folder needs transformers. Every rank calls it. Raises
    CheckpointError, one sentence, for what cannot be opened.
    """
    if (path / CONFIG).is_file():
        with together(mesh):
            return _open_folder(path, mesh, tokenizer)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist: name a checkpoint, a run directory or a Hugging Face folder")
    checkpoint = open_newest(path, mesh, say)
    if checkpoint.path == path and (fault := fault_of(checkpoint, mesh)) is not None:  # else it has been read through
        raise CheckpointError(f"{checkpoint.path} is damaged: {fault}: choose another checkpoint")
    values = checkpoint.manifest.model
    with together(mesh):
        found = tokenizer or tokenizer_of(checkpoint)[0]
        if found is None:
            raise CheckpointError(
                f"the data that {checkpoint.path} was trained on is not at its data.path: pass --tokenizer FILE"
            )
        words = _tokenizer(found, values, checkpoint.path)
        module = _load(from_hf(values), _dtype(values, checkpoint.path), StoredTensors(checkpoint.path), mesh.device)
        return _subject(module, words, values, mesh, checkpoint.path)


def _open_folder(path: Path, mesh: Mesh, tokenizer: Path | None) -> Subject:
    values = read_config(path)
    words = _tokenizer(tokenizer or path / TOKENIZER, values, path)
    if values.get("model_type") not in ("olmo", "olmoe"):
        module = _transformers_model(path).to(mesh.device)
        # transformers knows each model's name for its context length
        values["max_position_embeddings"] = getattr(module.config, "max_position_embeddings", None)
        return _subject(module, words, values, mesh, path)
    config, weights = from_hf(values), HuggingFaceWeights(path)
    weights.check(config)
    return _subject(_load(config, _dtype(values, path), weights, mesh.device), words, values, mesh, path)


def _tokenizer(file: Path, values: dict[str, Any], source: Path) -> Tokenizer:
    """The tokenizer in a file, whose tokens the model must know."""
    if not file.is_file():
        raise CheckpointError(f"{file} does not exist: pass --tokenizer FILE, a tokenizer.json")
    try:
        loaded = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises nothing more precise
        raise CheckpointError(f"{file} is not a tokenizer ({error}): pass --tokenizer FILE") from None
    size, vocabulary = loaded.get_vocab_size(), values.get("vocab_size")
    if vocabulary is not None and size > vocabulary:
        raise CheckpointError(
            f"{file} has {size} tokens and the model of {source} a vocabulary of {vocabulary}: pass --tokenizer FILE, "
            "the model's own"
        )
    if values.get("eos_token_id") in (None, []):
        raise CheckpointError(f"{source} names no eos_token_id in its configuration: add it")
    return loaded


def _subject(module: nn.Module, words: Tokenizer, values: dict[str, Any], mesh: Mesh, source: Path) -> Subject:
    eos, length = values["eos_token_id"], values.get("max_position_embeddings")
    if not isinstance(length, int):
        raise CheckpointError(f"{source} names no max_position_embeddings in its configuration: add it")
    return Subject(
        PlainModel(module.eval(), mesh, length),
        encoder(words),
        words.decode,
        eos[0] if isinstance(eos, list) else eos,
        source,
    )


def _load(config: ModelConfig, dtype: torch.dtype, source: WeightSource, device: torch.device) -> nn.Module:
    """Our module with the weights of `source`, its experts run by the fused kernels."""
    with torch.device("meta"):
        module = build(config).to(dtype)
    module.to_empty(device=device)
    if config.tie_word_embeddings:
        module.lm_head.weight = module.model.embed_tokens.weight
    parts = {}
    for name, parameter in module.named_parameters():
        values = parameter.data
        if name.endswith(GATE_UP):  # stored with gate and up apart
            experts, rows, hidden = values.shape
            values = values.view(experts, 2, rows // 2, hidden)
        parts[name] = PartOfParameter(tuple(values.shape), (Box((0,) * values.dim(), values),))
    source.read(parts)
    for block in module.modules():
        if isinstance(block, OlmoeExperts):
            _fuse(block)
    return module


def _fuse(experts: OlmoeExperts) -> None:
    """Replaces the readable forward of an expert block, in which every expert sees every token."""
    count, hidden, width = experts.down_proj.shape
    gate_up_E2IH = experts.gate_up_proj.view(count, 2, width, hidden)
    experts.forward = lambda x_TH, indices_TK, weights_TK: moe(  # type: ignore[method-assign]
        x_TH, weights_TK, indices_TK, gate_up_E2IH, experts.down_proj
    )


def _dtype(values: dict[str, Any], source: Path) -> torch.dtype:
    """What the weights are stored in, by transformers 5's name of the setting or 4's."""
    name = values.get("dtype") or values.get("torch_dtype") or "float32"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(
            f"{source} names {name!r} as its dtype, which is none of torch: write float32 or bfloat16"
        )
    return dtype


def _transformers_model(path: Path) -> Any:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        raise CheckpointError(
            f"{path} is neither OLMo nor OLMoE, and any other model needs transformers: "
            "pip install 'optimus-compiler[transformers]'"
        ) from None
    return AutoModelForCausalLM.from_pretrained(path, dtype="auto", local_files_only=True)
