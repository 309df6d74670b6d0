"""Writes a checkpoint as a Hugging Face folder: published names, safetensors files of bounded size, config, tokenizer.

It streams: of the weights one tensor is in memory at a time, whatever the layout that saved them.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from optimus_compiler.models import from_hf
from optimus_compiler.models.published import published_names
from optimus_compiler.runtime.checkpoint.folder import Checkpoint
from optimus_compiler.runtime.checkpoint.hugging_face import INDEX, SINGLE
from optimus_compiler.runtime.checkpoint.load import StoredTensors
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError, StoredParameter
from optimus_compiler.runtime.checkpoint.shards import Box, PartOfParameter
from optimus_compiler.runtime.files import synced_file

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}  # safetensors' names


@dataclass(frozen=True)
class PublishedTensor:
    """A tensor of the exported folder: matrix `number` of the parameter `source`."""

    name: str
    source: str
    number: int
    parameter: StoredParameter

    @property
    def shape(self) -> tuple[int, ...]:
        """[rows, columns], or [elements]."""
        return self.parameter.shape[-2:]

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return prod(self.shape) * getattr(torch, self.parameter.dtype).itemsize


def export(
    checkpoint: Checkpoint,
    output: Path,
    *,
    tokenizer: Path | None,
    eos: str | None,
    file_bytes: int,
    progress: Callable[[str, int, int], None],
) -> None:
    """Writes the folder `output`, which must not exist or be empty; it appears when it is complete.

    file_bytes: most bytes of weights in a file, where a tensor is not larger. tokenizer: a tokenizer.json to add,
    and its end-of-text token.
    progress(stage, done, total) in bytes. Raises CheckpointError.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise CheckpointError(f"{output} exists and is not empty: name another folder")
    partial = output.absolute().with_name(f".{output.absolute().name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        stored = StoredTensors(checkpoint.path)
        files = _divide(list(_published(checkpoint.manifest.parameters)), file_bytes)
        total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
        done = 0
        for name, tensors in files.items():
            for tensor in _write_safetensors(partial / name, tensors, stored):
                done += tensor.nbytes
                progress("exporting", done, total)
        if len(files) > 1:
            where = {tensor.name: name for name, tensors in files.items() for tensor in tensors}
            _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
        _write_json(partial / "config.json", checkpoint.manifest.model)
        if tokenizer is not None:
            _write_tokenizer(partial, tokenizer, eos, from_hf(checkpoint.manifest.model).max_position_embeddings)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _published(parameters: dict[str, StoredParameter]) -> Iterator[PublishedTensor]:
    for source, parameter in parameters.items():
        for number, name in enumerate(published_names(source, parameter.shape)):
            yield PublishedTensor(name, source, number, parameter)


def _divide(tensors: list[PublishedTensor], file_bytes: int) -> dict[str, list[PublishedTensor]]:
    """The tensors in order, by the name of their file."""
    files: list[list[PublishedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if files[-1] and size + tensor.nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.nbytes
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05}-of-{len(files):05}.safetensors": tensors for i, tensors in enumerate(files, start=1)}


def _write_safetensors(path: Path, tensors: list[PublishedTensor], stored: StoredTensors) -> Iterator[PublishedTensor]:
    """Writes a file in the safetensors format (its library needs all tensors at once); yields each one written."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        ends = [offset, offset := offset + tensor.nbytes]
        dtype = _DTYPES[tensor.parameter.dtype]
        header[tensor.name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": ends}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with synced_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(_bytes_of(_read(tensor, stored)))
            yield tensor


def _read(tensor: PublishedTensor, stored: StoredTensors) -> Tensor:
    shape = tensor.parameter.shape
    leading = [int(i) for i in np.unravel_index(tensor.number, shape[:-2])] if shape[:-2] else []
    values = torch.empty(tensor.shape, dtype=getattr(torch, tensor.parameter.dtype))
    boxed = values.view([1] * len(leading) + list(tensor.shape))
    corner = (*leading, *(0 for _ in tensor.shape))
    stored.read_exactly({tensor.source: PartOfParameter(shape, (Box(corner, boxed),))})
    return values


def _bytes_of(values: Tensor) -> np.ndarray:
    return values.reshape(-1).view(torch.uint8).numpy()


def _write_tokenizer(folder: Path, tokenizer: Path, eos: str | None, most_tokens: int) -> None:
    shutil.copyfile(tokenizer, folder / "tokenizer.json")
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": most_tokens}
    _write_json(folder / "tokenizer_config.json", settings | ({"eos_token": eos} if eos else {}))


def _write_json(path: Path, values: object) -> None:
    with synced_file(path) as file:
        file.write(json.dumps(values, indent=2).encode() + b"\n")
