"""Weights of a Hugging Face folder, read slice by slice: published names (transformers 4) or stacked ones (5)."""

import json
from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from optimus_compiler.models import ModelConfig, build
from optimus_compiler.models.published import published_names, published_shapes
from optimus_compiler.runtime.checkpoint.contents import Parts
from optimus_compiler.runtime.checkpoint.manifest import CheckpointError
from optimus_compiler.runtime.checkpoint.shards import Box

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_NO_WEIGHTS = (".rotary_emb.inv_freq",)  # buffers that old files hold


class HuggingFaceWeights:
    """The tensors of a folder's safetensors files; nothing is read before it is needed."""

    def __init__(self, folder: Path) -> None:
        """Opens the files. Raises CheckpointError for a folder without them, or with a broken one."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError:
            raise CheckpointError(
                "reading a Hugging Face folder needs safetensors: pip install 'optimus-compiler[safetensors]'"
            ) from None
        self.folder = folder
        self._file_of: dict[str, Any] = {}  # tensor name -> open file
        for path in _files_of(folder):
            try:
                file: Any = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} could not be opened ({error}): download or save it again") from None
            self._file_of |= dict.fromkeys(file.keys(), file)

    def check(self, config: ModelConfig) -> None:
        """Raises CheckpointError, naming the tensor, unless the files hold the very weights of a model."""
        with torch.device("meta"):
            model = build(config)
        unknown = {name for name in self._file_of if not name.endswith(_NO_WEIGHTS)}
        for name, parameter in model.named_parameters():
            stacked = {name: tuple(parameter.shape)}
            expected = stacked if name in self._file_of else published_shapes(name, parameter.shape)
            for each, shape in expected.items():
                if each not in self._file_of:
                    raise CheckpointError(f"{self.folder} holds no {each}, which the model of this configuration has")
                if (found := self._shape(each)) != shape:
                    raise CheckpointError(f"{self.folder} holds {each} as {list(found)}; the model needs {list(shape)}")
                unknown.discard(each)
        if config.tie_word_embeddings:
            unknown.discard("lm_head.weight")
        if unknown:
            raise CheckpointError(
                f"{self.folder} holds {min(unknown)}, which the model of this configuration has not: check model.name "
                "and model.overrides"
            )

    def read(self, parts: Parts) -> None:
        """Fills the boxes of `parts` by parameter name, cast to their dtype."""
        for name, part in parts.items():
            for box in part.boxes:
                for number, values, cuts in _matrices_in(box, tuple(part.size())):
                    values.copy_(self._read(name, tuple(part.size()), number, cuts))

    def _read(self, name: str, shape: tuple[int, ...], number: int, cuts: tuple[slice, ...]) -> Tensor:
        """A slice of the matrix (or vector) with this number of a parameter."""
        published = published_names(name, shape)[number]
        if published in self._file_of:
            return self._file_of[published].get_slice(published)[cuts]
        rows = shape[-2]
        expert, first = divmod(number * rows, self._shape(name)[1])
        row, column = cuts
        return self._file_of[name].get_slice(name)[expert, first + row.start : first + row.stop, column]

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file_of[name].get_slice(name).get_shape())


def _matrices_in(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Tensor, tuple[slice, ...]]]:
    """(number of a matrix, the part of the box in it, where in the matrix that is) of all that a box touches."""
    sizes = tuple(box.values.shape)
    cuts = tuple(slice(start, start + size) for start, size in zip(box.corner[-2:], sizes[-2:], strict=True))
    for index in product(*(range(size) for size in sizes[:-2])):
        at = [start + i for start, i in zip(box.corner[:-2], index, strict=True)]
        yield _row_major(at, shape[:-2]), box.values[index], cuts


def _row_major(index: Sequence[int], shape: Sequence[int]) -> int:
    """The number of an element in row-major order."""
    return sum(i * prod(shape[axis + 1 :]) for axis, i in enumerate(index))


def _files_of(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        try:
            names = set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{folder / INDEX} is no index of weights ({error}): download it again") from None
        return [folder / name for name in sorted(names)]
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    raise CheckpointError(
        f"{folder} is neither a checkpoint nor a Hugging Face folder with {SINGLE}: give one of them, or save the "
        "model there with save_pretrained"
    )
