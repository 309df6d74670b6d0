"""The text of the studies: a tokenizer of 4,096 tokens trained on it, sequences of 256, some documents held out."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from optimus_compiler.cli.demo import standard_library, train_tokenizer
from optimus_compiler.cli.stages import StageProgress
from optimus_compiler.runtime.data.documents import Document, find_files, read_documents
from optimus_compiler.runtime.data.prepare import prepare

VOCABULARY, CONTEXT_LENGTH = 4096, 256
HELD_OUT = 0.003  # of the documents


@dataclass(frozen=True)
class Corpus:
    """Prepared folders."""

    training: Path
    validation: Path


def make_corpus(folder: Path, source: Path | None) -> Corpus:
    """Prepares the documents below `source`, or the sources of Python's library, in `folder`.

    Raises DataError where `folder` holds another corpus.
    """
    corpus = Corpus(folder / "training", folder / "validation")
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, library = folder / "tokenizer.json", folder / "library.jsonl"
    if source is None:
        library.write_text("".join(json.dumps({"text": text}) + "\n" for text in standard_library()), encoding="utf-8")
    files = find_files([source or library])
    train_tokenizer(list(_texts(files)), tokenizer)
    with StageProgress() as progress:
        prepare(
            files,
            tokenizer=tokenizer,
            context_length=CONTEXT_LENGTH,
            output=corpus.training,
            validation_fraction=HELD_OUT,
            validation_output=corpus.validation,
            workers=2,
            progress=progress.show,
        )
    return corpus


def _texts(files: Iterable[Path]) -> Iterable[str]:
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            for document in read_documents(file, "text", Path(scratch) / "large"):
                if isinstance(document, Document) and isinstance(document.text, str):
                    yield document.text
