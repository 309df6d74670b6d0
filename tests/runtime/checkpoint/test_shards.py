"""Flat ranges as boxes: every range of every small shape; stored, and read in other ranges and by torch's tools."""

from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from optimus_compiler.mesh import Mesh
from optimus_compiler.program import ParameterSpec, Source
from optimus_compiler.runtime.checkpoint import shards
from optimus_compiler.runtime.checkpoint.shards import boxes_of_range, part_of_parameter
from optimus_compiler.runtime.checkpoint.storage import CheckedWriter, CheckpointReader
from optimus_compiler.runtime.files import sha256_of

SHAPE = (3, 2, 4, 5)


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (1, 4), (2, 3, 4), (1, 1, 3), (2, 1, 3, 2)])
def test_boxes_are_the_elements_of_the_range_in_order(shape: tuple[int, ...]) -> None:
    full = torch.arange(prod(shape)).view(shape)
    for start, stop in product(range(prod(shape) + 1), repeat=2):
        boxes = list(boxes_of_range(shape, start, stop))
        elements = [full[tuple(slice(o, o + s) for o, s in zip(*box, strict=True))].flatten() for box in boxes]
        assert torch.cat([*elements, full.new_empty(0)]).tolist() == list(range(start, stop))
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert all(prod(sizes) > 0 for _, sizes in boxes)


def spec() -> ParameterSpec:
    return ParameterSpec("m.w", SHAPE, torch.float32, Source(("m.w",), SHAPE))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A parameter 0, 1, 2, ... of 120 elements, stored in boxes of at most 11 elements."""
    monkeypatch.setattr(shards, "LARGEST_BOX", 11)
    writer = CheckedWriter(tmp_path)
    part = part_of_parameter(spec(), Mesh.abstract(), torch.arange(120.0), 0)
    dcp.save({"m.w": part}, storage_writer=writer, no_dist=True)
    (file,) = writer.files
    assert writer.files[file].sha256 == sha256_of(tmp_path / file)
    assert writer.files[file].bytes == (tmp_path / file).stat().st_size
    return tmp_path


@pytest.mark.parametrize("box", [2**23, 11, 7])
def test_any_range_is_read(stored: Path, box: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "LARGEST_BOX", box)
    reader = CheckpointReader(stored)
    for start, stop in ((0, 120), (3, 50), (77, 78), (20, 120), (119, 120)):
        values = torch.full((stop - start,), torch.nan, dtype=torch.float64)
        part = part_of_parameter(spec(), Mesh.abstract(), values, start)
        dcp.load({"m.w": part}, storage_reader=reader, no_dist=True)
        assert values.tolist() == list(range(start, stop))


def test_only_boxes_that_are_needed_are_read(stored: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[torch.Tensor] = []
    load = torch.load

    def watched(*arguments: Any, **keywords: Any) -> torch.Tensor:
        loads.append(load(*arguments, **keywords))
        return loads[-1]

    monkeypatch.setattr(torch, "load", watched)
    part = part_of_parameter(spec(), Mesh.abstract(), torch.zeros(11), 22)
    dcp.load({"m.w": part}, storage_reader=CheckpointReader(stored), no_dist=True)
    assert sorted(torch.cat([each.flatten() for each in loads]).tolist()) == list(range(22, 33))


def test_torch_reads_the_files_without_us(stored: Path, tmp_path: Path) -> None:
    dcp_to_torch_save(stored, tmp_path / "whole.pt")
    assert torch.equal(torch.load(tmp_path / "whole.pt")["m.w"], torch.arange(120.0).view(SHAPE))
