"""Parts of parameters as torch.distributed.checkpoint stores them: whatever flat range a rank holds, under one name.

A flat range of a row-major tensor is at most a few boxes (a partial first row, whole rows, a partial last row, again
inside each row), and boxes are what a checkpoint is made of. So a rank writes the range of a parameter's shard that it
holds, and reads any other, with no conversion between layouts.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from optimus_compiler.mesh import Mesh
from optimus_compiler.program import ParameterSpec

# Elements of the largest stored box. A reader loads whole boxes: it takes at most this much that it does not need at
# either end of a range, and holds no more than this beside its own tensors.
LARGEST_BOX = 2**23


@dataclass(frozen=True)
class Box:
    """A box of a parameter, `corner` its first element, and the tensor that holds (or receives) its values."""

    corner: tuple[int, ...]
    values: Tensor

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box as a checkpoint's metadata has it."""
        return ChunkStorageMetadata(torch.Size(self.corner), self.values.size())


class PartOfParameter(torch.Tensor):
    """Stands for a whole parameter of `shape` of which this process has some boxes: DCP asks it for those."""

    boxes: tuple[Box, ...]

    @staticmethod
    def __new__(cls, shape: tuple[int, ...], boxes: tuple[Box, ...]) -> "PartOfParameter":
        values = boxes[0].values
        part = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=values.dtype, device=values.device)
        part.boxes = boxes
        return part

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} on a part of a parameter, which is only stored and loaded")

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(name, box.corner),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=box.chunk, properties=properties, size=self.size()),
            )
            for box in self.boxes
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [box.chunk for box in self.boxes]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(box.values for box in self.boxes if box.corner == tuple(index.offset or ()))


def part_of_parameter(spec: ParameterSpec, mesh: Mesh, values: Tensor, start: int) -> PartOfParameter:
    """The part of a parameter of which flat `values` hold elements [start, start + len) of this rank's shard.

    The boxes are views of `values`.
    """
    corner, shape = [cut.start for cut in spec.box(mesh)], spec.local_shape(mesh)
    boxes: list[Box] = []
    for first in range(0, len(values), LARGEST_BOX):
        position, last = first, min(first + LARGEST_BOX, len(values))
        for offsets, sizes in boxes_of_range(shape, start + first, start + last):
            at = tuple(map(sum, zip(corner, offsets, strict=True)))
            boxes.append(Box(at, values[position : position + prod(sizes)].view(sizes)))
            position += prod(sizes)
    return PartOfParameter(spec.shape, tuple(boxes))


def boxes_of_range(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Elements [start, stop) of a row-major tensor as (offsets, sizes) of boxes, in the order of their elements."""
    if start >= stop:
        return
    if len(shape) == 0:
        yield (), ()
        return
    row = prod(shape[1:])
    first, last = -(-start // row), stop // row  # whole rows
    if first > last:  # all of it lies within one row
        for offsets, sizes in boxes_of_range(shape[1:], start - last * row, stop - last * row):
            yield (last, *offsets), (1, *sizes)
        return
    for offsets, sizes in boxes_of_range(shape[1:], start - (first - 1) * row, row if start < first * row else 0):
        yield (first - 1, *offsets), (1, *sizes)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    for offsets, sizes in boxes_of_range(shape[1:], 0, stop - last * row):
        yield (last, *offsets), (1, *sizes)
