"""Prepares a corpus for pretraining: tokenise each file, cut into instances, shuffle, shard, commit by one rename."""

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from optimus_compiler.runtime.data.documents import find_files
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.manifest import TOKENIZER, Counts, Manifest, Source, TokenizerFile
from optimus_compiler.runtime.data.shards import write_shards
from optimus_compiler.runtime.data.tokenise import TextTokenizer
from optimus_compiler.runtime.data.workers import tokenise_files


def prepare(
    inputs: Sequence[str | Path],
    *,
    tokenizer: str | Path,
    context_length: int,
    output: str | Path,
    workers: int = 1,
    seed: int = 0,
    text_field: str = "text",
    shard_tokens: int = 1 << 26,
    eos: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Manifest:
    """Writes the folder `output`: shards, manifest.json, tokenizer.json (a copy). The bytes do not depend on `workers`.

    `inputs` are files, folders or patterns (`documents.find_files`); each file's documents are tokenised with EOS after
    each and joined, and the joined stream is cut into instances of `context_length` tokens. The tail of a file that
    does not fill an instance is dropped and counted, as in the paper's pipeline (Optimus-LM). `progress` is called with
    (bytes done, bytes in all) of the input files. All is written to the dot-folder beside `output` and renamed at the
    end, so `output` is whole or absent. Raises DataError or OSError.
    """
    tokenizer, output = Path(tokenizer), Path(output)
    _check_arguments(context_length, workers, seed, shard_tokens)
    if output.exists() and not (output.is_dir() and not any(output.iterdir())):
        raise DataError(f"{output} exists and is not an empty folder: name another output or delete it")
    files = find_files(inputs)
    total_bytes = sum(file.stat().st_size for file in files)
    loaded = TextTokenizer.load(tokenizer, eos)

    with _PartialFolder(output) as folder:
        tokens_folder = folder / "tokens"
        tokens_folder.mkdir()
        token_files = [tokens_folder / f"{number:05d}.bin" for number in range(len(files))]
        sources = tokenise_files(
            files,
            token_files,
            tokenizer=tokenizer,
            eos=loaded.eos,
            text_field=text_field,
            workers=min(workers, len(files)),
            progress=lambda done: progress(done, total_bytes) if progress else None,
        )
        sources = [_cut(source, context_length) for source in sources]
        counts = _sum(sources)
        if counts.instances == 0:
            raise DataError(
                f"no instance of {context_length} tokens fits: the inputs hold {counts.tokens} tokens in {len(files)} "
                f"files and each file's tail is dropped: add text, join small files, or use a smaller context length"
            )
        shards = write_shards(
            folder,
            token_files,
            [source.counts.instances for source in sources],
            loaded.dtype,
            context_length=context_length,
            shard_tokens=shard_tokens,
            seed=seed,
        )
        shutil.rmtree(tokens_folder)
        shutil.copyfile(tokenizer, folder / TOKENIZER)
        manifest = Manifest(
            dtype="uint16" if loaded.dtype.itemsize == 2 else "uint32",
            vocab_size=loaded.vocab_size,
            eos=loaded.eos,
            eos_id=loaded.eos_id,
            tokenizer=TokenizerFile(file=tokenizer.name, sha256=loaded.sha256),
            context_length=context_length,
            seed=seed,
            counts=counts,
            sources=tuple(sources),
            shards=tuple(shards),
        )
        manifest.write(folder)
    return manifest


def _check_arguments(context_length: int, workers: int, seed: int, shard_tokens: int) -> None:
    if context_length < 2:
        raise DataError(f"context length {context_length} is too short: a loss needs a token and the one after it")
    if workers < 1:
        raise DataError(f"{workers} workers cannot tokenise: give 1 or more")
    if not 0 <= seed < 1 << 64:
        raise DataError(f"seed {seed} is out of range: give one from 0 to 2^64 - 1")
    if shard_tokens < context_length:
        raise DataError(f"a shard of {shard_tokens} tokens cannot hold an instance of {context_length}: make it larger")


class _PartialFolder(AbstractContextManager[Path]):
    """A dot-folder beside `output` that becomes `output` when the block ends and vanishes if it raises (Ctrl-C too)."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.folder = output.parent / f".{output.name}.partial"

    def __enter__(self) -> Path:
        self.output.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.folder.mkdir()
        except FileExistsError as error:
            raise DataError(
                f"{self.folder} exists: another run is preparing {self.output} or was killed: delete it if none runs"
            ) from error
        return self.folder

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.folder.rename(self.output)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)


def _cut(source: Source, context_length: int) -> Source:
    instances, dropped = divmod(source.counts.tokens, context_length)
    counts = source.counts.model_copy(update={"instances": instances, "dropped_tokens": dropped})
    return source.model_copy(update={"counts": counts})


def _sum(sources: Sequence[Source]) -> Counts:
    return Counts(**{name: sum(getattr(source.counts, name) for source in sources) for name in Counts.model_fields})
