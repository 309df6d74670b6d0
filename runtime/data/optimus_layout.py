"""The folder that Intel's Optimus-LM prepares: what of it is there, which file is which, and whether it fits together.

tokenized_data/CATEGORY_FILE.npy: the ids of an input file's documents, EOS after each (int32, flat)
num_instances_fF_cC.npy: how many instances of C tokens each of the first F files gives; what follows them is left out
shuffling_order_fF_cC_1.npy: which instance, counted through all files, comes at each position
sharded_data_fF_cC/shard_N.npy: the instances in that order (int32, flat), as many in every shard but the last
../../urls.txt: the order of the files, a URL .../CATEGORY/FILE.json.gz in each line
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from optimus_compiler.runtime.data.errors import DataError

SUFFIX = re.compile(r"f[1-9]\d*_c[1-9]\d*")
BLOCK = 1 << 20  # instances of the shuffling order looked at at a time


@dataclass(frozen=True)
class IdFile:
    """An int32 .npy file of token ids, flat or [rows, context length]."""

    path: Path
    tokens: int

    @staticmethod
    def open(path: Path) -> "IdFile":
        """Checks header and size; raises DataError when the file is damaged or holds anything else."""
        held = _map(path)
        if held.dtype != np.dtype("<i4") or held.ndim not in (1, 2) or not held.flags.c_contiguous:
            raise DataError(f"{path} holds {held.dtype} {list(held.shape)}, not int32 token ids: restore it")
        return IdFile(path, held.size)

    def blocks(self, tokens: int) -> Iterator[NDArray[np.int32]]:
        """Its ids, `tokens` at a time. Each block has a map of its own: what a map has read counts as memory."""
        for first in range(0, self.tokens, tokens):
            yield _map(self.path).reshape(-1)[first : first + tokens]

    def rows(self, context_length: int) -> NDArray[np.int32]:
        """Its whole instances, mapped: int32 [instances, context_length]."""
        instances = self.tokens // context_length
        return _map(self.path).reshape(-1)[: instances * context_length].reshape(instances, context_length)


def gather(
    files: Sequence[IdFile], ends_F: NDArray[np.int64], instances_B: NDArray[np.int64], context_length: int
) -> NDArray[np.int32]:
    """Instances `instances_B`, counted through all files, of which `ends_F` says where each ends: int32 [B, C]."""
    files_B = np.searchsorted(ends_F, instances_B, side="right")
    block_BC = np.empty((len(instances_B), context_length), np.int32)
    for f in np.unique(files_B):  # one map at a time: there may be more files than a process can hold open
        within_b = instances_B[files_B == f] - (ends_F[f - 1] if f else 0)
        block_BC[files_B == f] = files[f].rows(context_length)[within_b]
    return block_BC


@dataclass(frozen=True)
class OptimusLayout:
    """What a folder holds for one choice of files and context length. What is absent is empty or None."""

    folder: Path
    context_length: int
    shards: tuple[IdFile, ...]
    token_files: tuple[IdFile, ...]
    instances_F: NDArray[np.int64] | None  # of each token file
    order: NDArray[np.int64] | None  # mapped: int64 [instances]

    @staticmethod
    def find(folder: Path, layout: str | None) -> "OptimusLayout":
        """Reads `folder`, for the choice `layout` ("f2903_c2048") where it holds several.

        Raises DataError when files are missing or damaged, do not fit together, or do not give the instances.
        """
        suffix = _choose(folder, layout)
        files, context_length = map(int, re.findall(r"\d+", suffix))
        instances_F = _read_instances(folder / f"num_instances_{suffix}.npy", files)
        found = OptimusLayout(
            folder,
            context_length,
            _shards(folder / f"sharded_data_{suffix}", context_length),
            _token_files(folder, files, instances_F, context_length),
            instances_F,
            _read_order(folder / f"shuffling_order_{suffix}_1.npy"),
        )
        if not found.shards and not (found.token_files and found.order is not None):
            raise DataError(
                f"{folder} has neither shards nor all that they are made of (tokenized_data and "
                f"shuffling_order_{suffix}_1.npy): give a folder that Optimus-LM prepared"
            )
        found._check_counts()
        return found

    @property
    def ends_F(self) -> NDArray[np.int64]:
        """Where the instances of each token file end, counted through all of them."""
        return np.cumsum([file.tokens // self.context_length for file in self.token_files], dtype=np.int64)

    @property
    def ends_S(self) -> NDArray[np.int64]:
        """Where the instances of each shard end."""
        return np.cumsum([shard.tokens // self.context_length for shard in self.shards], dtype=np.int64)

    @property
    def instances(self) -> int:
        """How many there are in all."""
        return int((self.ends_S if self.shards else self.ends_F)[-1])

    def read(self, positions_B: NDArray[np.int64]) -> NDArray[np.int32]:
        """The instances at these positions of the shuffled order: int32 [B, context_length]."""
        if self.shards:
            return gather(self.shards, self.ends_S, positions_B, self.context_length)
        return self.read_by_order(positions_B)

    def read_by_order(self, positions_B: NDArray[np.int64]) -> NDArray[np.int32]:
        """The same, taken from the token files by the shuffling order."""
        assert self.order is not None
        return gather(self.token_files, self.ends_F, self.order[positions_B], self.context_length)

    def holder(self, position: int) -> Path:
        """The file from which `read` takes the instance at a position."""
        if self.shards:
            return self.shards[int(np.searchsorted(self.ends_S, position, side="right"))].path
        assert self.order is not None
        return self.token_files[int(np.searchsorted(self.ends_F, self.order[position], side="right"))].path

    def _check_counts(self) -> None:
        counts = {
            "the shards": self.instances if self.shards else None,
            "tokenized_data": int(self.ends_F[-1]) if self.token_files else None,
            "num_instances": None if self.instances_F is None else int(self.instances_F.sum()),
            "shuffling_order": None if self.order is None else len(self.order),
        }
        known = {name: count for name, count in counts.items() if count is not None}
        if len(set(known.values())) > 1:
            said = ", ".join(f"{name} {count}" for name, count in known.items())
            raise DataError(f"{self.folder} contradicts itself about the number of instances ({said}): restore it")
        if self.instances == 0:
            raise DataError(f"{self.folder} holds no instance of {self.context_length} tokens: nothing to import")
        if self.order is not None:
            _check_permutation(self.order, self.folder)


def _choose(folder: Path, layout: str | None) -> str:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder: give one that Optimus-LM prepared")
    paths = [
        path for kind in ("num_instances", "shuffling_order", "sharded_data") for path in folder.glob(f"{kind}_f*")
    ]
    found = sorted({match[0] for path in paths if (match := SUFFIX.search(path.name))})
    if layout is not None and layout not in found:
        raise DataError(
            f"{folder} holds nothing for {layout!r}: choose one of what it holds ({', '.join(found) or 'nothing'})"
        )
    if layout is None and len(found) != 1:
        if not found:
            raise DataError(f"{folder} was not prepared by Optimus-LM: it has no num_instances_f*_c*.npy and the like")
        raise DataError(f"{folder} was prepared in several ways: choose one with --layout ({', '.join(found)})")
    return layout or found[0]


def _map(path: Path) -> NDArray:
    try:
        held = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as error:
        raise DataError(f"{path} is truncated or not a .npy file ({error}): restore it") from error
    if held.nbytes + held.offset != path.stat().st_size:
        raise DataError(f"{path} has bytes after its end: restore it")
    return held


def _read_instances(path: Path, files: int) -> NDArray[np.int64] | None:
    if not path.exists():
        return None
    instances_F = _map(path)
    if instances_F.dtype.kind not in "iu" or instances_F.shape != (files,) or (instances_F < 0).any():
        raise DataError(f"{path} does not hold the number of instances of {files} files: restore it")
    return instances_F.astype(np.int64)


def _read_order(path: Path) -> NDArray[np.int64] | None:
    if not path.exists():
        return None
    order = _map(path)
    if order.dtype.kind not in "iu" or order.ndim != 1:
        raise DataError(f"{path} holds {order.dtype} {list(order.shape)}, not the numbers of instances: restore it")
    return order


def _check_permutation(order: NDArray[np.int64], folder: Path) -> None:
    seen = np.zeros(len(order), np.bool_)
    for first in range(0, len(order), BLOCK):
        block_B = order[first : first + BLOCK]
        seen[block_B[(block_B >= 0) & (block_B < len(order))]] = True
    if not seen.all():
        raise DataError(
            f"the shuffling order in {folder} is no permutation (instance {int(seen.argmin())} of {len(order)} is not "
            f"in it): restore it"
        )


def _shards(folder: Path, context_length: int) -> tuple[IdFile, ...]:
    numbers = sorted(int(path.stem[6:]) for path in folder.glob("shard_*.npy") if path.stem[6:].isdecimal())
    if missing := sorted(set(range(len(numbers))) - set(numbers)):
        raise DataError(f"{folder / f'shard_{missing[0]}.npy'} is missing: restore it")
    shards = tuple(IdFile.open(folder / f"shard_{number}.npy") for number in numbers)
    for number, shard in enumerate(shards):
        full = shards[0].tokens
        if shard.tokens % context_length or shard.tokens > full or (shard.tokens < full and number < len(shards) - 1):
            raise DataError(
                f"{shard.path} holds {shard.tokens} tokens: not whole instances, or not as many as shard_0.npy: "
                f"restore it"
            )
    return shards


def _token_files(
    folder: Path, files: int, instances_F: NDArray[np.int64] | None, context_length: int
) -> tuple[IdFile, ...]:
    """The first `files` files of tokenized_data, in the order of urls.txt, else in one that num_instances allows."""
    tokenized = folder / "tokenized_data"
    if not tokenized.is_dir():
        return ()
    listed = next((path for path in (folder / "../../urls.txt", folder / "urls.txt") if path.is_file()), None)
    if listed is not None:
        urls = [url.strip().split("/") for url in listed.read_text(encoding="utf-8").splitlines() if url.strip()]
        paths = [tokenized / f"{parts[-2]}_{parts[-1].split('.')[0]}.npy" for parts in urls[:files]]
    else:
        paths = sorted(tokenized.glob("*.npy"))
    for path in paths:
        if not path.is_file():
            raise DataError(f"{path} is missing (it is in {listed}): restore it")
    if len(paths) < files:
        raise DataError(f"{tokenized} holds {len(paths)} of {files} files: restore it, or move it away to do without")
    held = [IdFile.open(path) for path in paths]
    if instances_F is None:
        return tuple(held[:files])
    ordered = []
    for count in instances_F.tolist():
        fits = (file for file in held if file.tokens // context_length == count)
        file = held[0] if listed is not None else next(fits, held[0])
        if file.tokens // context_length != count:
            raise DataError(
                f"{file.path} holds {file.tokens // context_length} instances, num_instances says {count}: restore "
                f"either, or urls.txt, which says the order of the files"
            )
        held.remove(file)
        ordered.append(file)
    return tuple(ordered)
