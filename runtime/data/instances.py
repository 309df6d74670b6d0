"""Which tokens form an instance: units are cut into context lengths, tails dropped or kept, files weighted."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import floor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.files import read_vector, write_vector
from optimus_compiler.runtime.data.manifest import Recipe, Tails
from optimus_compiler.runtime.data.shuffle import permute
from optimus_compiler.runtime.data.tokenised import TokenisedFile, ends_file, ids_file

SUBSET = 1 << 63  # the second key of a permutation is an epoch below this, or a file's number above


def cut(ends: Iterable[NDArray[np.int64]], context_length: int, tails: Tails) -> Iterator[NDArray[np.int64]]:
    """How many instances each unit and those before it give, for units that end at `ends`, piece by piece.

    A unit is what is cut on its own: all documents of a file joined, or each of them. Its rest is dropped or kept.
    """
    end = instances = 0
    for ends_U in ends:
        lengths_U = np.diff(ends_U, prepend=end)
        instances_U = instances + np.cumsum(
            (lengths_U + (context_length - 1 if tails == "keep" else 0)) // context_length
        )
        yield instances_U
        end, instances = ends_U[-1], instances_U[-1]


@dataclass(frozen=True)
class Units:
    """The units of one file: where each ends, and how many instances it and those before it give (int64 [U])."""

    ends_U: NDArray[np.int64]
    instances_U: NDArray[np.int64]
    context_length: int

    def locate(self, instances_B: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where in the file each instance starts, and how many tokens it takes there: int64 [B], int64 [B].

        An instance that takes fewer than context_length tokens is a kept rest.
        """
        units_B = np.searchsorted(self.instances_U, instances_B, side="right")
        before_B = np.maximum(units_B - 1, 0)
        within_B = instances_B - np.where(units_B > 0, self.instances_U[before_B], 0)
        starts_B = np.where(units_B > 0, self.ends_U[before_B], 0) + within_B * self.context_length
        return starts_B, np.minimum(self.context_length, self.ends_U[units_B] - starts_B)


def weighted(instances: int, weight: float) -> int:
    """floor(instances * weight), with the weight as its decimal digits say: 0.29 of 100 is 29."""
    return floor(instances * Fraction(str(weight)))


def unweighted(stored_B: NDArray[np.int64], instances: int, stored: int, seed: int, number: int) -> NDArray[np.int64]:
    """Which of the `instances` of file `number` numbers `stored_B` of its `stored` ones are: int64 [B] to int64 [B].

    Whole repetitions come first, then a subset that the permutation keyed by seed and file number chooses.
    """
    repetitions_B, instances_B = np.divmod(stored_B, instances)
    subset_B = repetitions_B == stored // instances
    if subset_B.any():
        instances_B[subset_B] = permute(instances_B[subset_B], instances, seed, SUBSET + number)
    return instances_B


@dataclass(frozen=True)
class CutFile:
    """The flat token ids of one input file, and the instances they are cut into."""

    ids: Path
    tokens: int
    instances: int
    weight: float
    index: tuple[Path, Path] | None = None  # the .npy vectors of `Units`; None: the file is one unit

    @staticmethod
    def of(folder: Path, number: int, tokenised: TokenisedFile, weight: float, recipe: Recipe) -> "CutFile":
        """Cuts tokenised file `number` of `folder`; separate documents get an index there: NNNNN.instances.npy."""
        ids, ends = ids_file(folder, number), ends_file(folder, number)
        if recipe.documents == "join":
            (joined_U,) = cut([np.array([tokenised.tokens])], recipe.context_length, recipe.tails)
            return CutFile(ids, tokenised.tokens, int(joined_U[-1]), weight)
        index = folder / f"{number:05d}.instances.npy"
        write_vector(index, tokenised.documents, cut(read_vector(ends), recipe.context_length, recipe.tails))
        instances = int(np.load(index, mmap_mode="r")[-1]) if tokenised.documents else 0
        return CutFile(ids, tokenised.tokens, instances, weight, (ends, index))

    @cached_property
    def stored(self) -> int:
        """How many instances the weight makes of them."""
        return weighted(self.instances, self.weight)

    def units(self, context_length: int) -> Units:
        """The units: mapped from their files when there may be many."""
        if self.index is None:
            return Units(np.array([self.tokens]), np.array([self.instances]), context_length)
        ends_U, instances_U = (np.asarray(np.load(path, mmap_mode="r")) for path in self.index)
        return Units(ends_U, instances_U, context_length)


@dataclass(frozen=True)
class Instances:
    """All weighted instances of a corpus in the order they are stored: shuffled by seed."""

    files: Sequence[CutFile]
    dtype: np.dtype
    context_length: int
    eos_id: int
    seed: int

    @cached_property
    def _ends_F(self) -> NDArray[np.int64]:
        return np.cumsum([file.stored for file in self.files])

    def __len__(self) -> int:
        return int(self._ends_F[-1])

    def read(self, first: int, last: int) -> NDArray:
        """The stored rows `first` to `last - 1`: [last - first, context_length] of `dtype`; a rest is filled with EOS.

        Row p is weighted instance `permute(p)` of all files in order. One file is open at a time, each opened once and
        read from its start to its end. Raises DataError when a file has become shorter.
        """
        weighted_B = permute(np.arange(first, last), len(self), self.seed, epoch=0)
        order_B = np.argsort(weighted_B)
        files_B = np.searchsorted(self._ends_F, weighted_B[order_B], side="right")
        numbers, firsts = np.unique(files_B, return_index=True)
        block_BT = np.full((last - first, self.context_length), self.eos_id, self.dtype)
        for number, rows_b in zip(numbers.tolist(), np.split(order_B, firsts[1:]), strict=True):
            file = self.files[number]
            stored_b = weighted_B[rows_b] - (self._ends_F[number] - file.stored)
            instances_b = unweighted(stored_b, file.instances, file.stored, self.seed, number)
            starts_b, lengths_b = file.units(self.context_length).locate(instances_b)
            _fill(block_BT, rows_b, file.ids, starts_b, lengths_b)
        return block_BT


def _fill(
    block_BT: NDArray, rows_b: NDArray[np.int64], ids: Path, starts_b: NDArray[np.int64], lengths_b: NDArray[np.int64]
) -> None:
    # Reads into place: a map of a large file would count as this process's memory.
    order_b = np.argsort(starts_b)
    file = os.open(ids, os.O_RDONLY)
    try:
        for row, start, length in zip(
            rows_b[order_b].tolist(), starts_b[order_b].tolist(), lengths_b[order_b].tolist(), strict=True
        ):
            wanted = block_BT[row, :length]
            if os.preadv(file, [wanted.data], start * wanted.itemsize) != wanted.nbytes:
                raise DataError(f"{ids} is shorter than when it was written: delete its folder and prepare again")
    finally:
        os.close(file)
