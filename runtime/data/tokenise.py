"""Turns the documents of one file into a flat file of token ids, the EOS token after each document."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from optimus_compiler.runtime.data.documents import Document, read_documents
from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.manifest import Counts, Source

EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")
CHUNK_CHARACTERS = 1 << 18  # bounds memory: the library keeps offsets and strings beside the ids of a batch


@dataclass(frozen=True)
class TextTokenizer:
    """A Hugging Face `tokenizers` tokenizer that reads every character of a document as ordinary text."""

    tokenizer: Tokenizer
    vocab_size: int  # largest id + 1: ids may have holes
    eos: str
    eos_id: int
    sha256: str  # of the JSON file

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id: little-endian uint16 up to 65,536 ids, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    @staticmethod
    def load(path: Path, eos: str | None = None) -> "TextTokenizer":
        """Reads a tokenizer.json; `eos` names the end-of-document token where the usual names do not decide it.

        Raises DataError if the file is not a tokenizer or the EOS token is absent or ambiguous, OSError if unreadable.
        """
        data = path.read_bytes()
        try:
            tokenizer = Tokenizer.from_str(data.decode("utf-8"))
        except Exception as error:  # the library raises plain Exception for any fault in the file
            raise DataError(f"{path} is not a Hugging Face tokenizer.json ({error}): give another file") from error
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        eos = _find_eos(vocabulary, eos, path)
        # "<|endoftext|>" written in a document is text, not an end. encode_special_tokens does that for tokens marked
        # special, so mark EOS where the file forgot to. Truncation would cut documents, and padding add to them.
        tokenizer.add_special_tokens([AddedToken(eos, normalized=False, special=True)])
        tokenizer.encode_special_tokens = True
        tokenizer.no_truncation()
        tokenizer.no_padding()
        return TextTokenizer(
            tokenizer, max(vocabulary.values()) + 1, eos, vocabulary[eos], hashlib.sha256(data).hexdigest()
        )

    def encode(self, texts: list[str]) -> list[list[int]]:
        """The ids of each text, with no token added."""
        # One worker is one core; and threads of the library would not survive a later fork of this process.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        return [encoding.ids for encoding in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


def _find_eos(vocabulary: dict[str, int], eos: str | None, path: Path) -> str:
    if eos is not None:
        if eos not in vocabulary:
            raise DataError(f"{path} has no token {eos!r} to end documents with: name one of its tokens with --eos")
        return eos
    known = [token for token in EOS_TOKENS if token in vocabulary]
    if len(known) != 1:
        found = f"several end-of-text tokens ({', '.join(known)})" if known else "none of the usual end-of-text tokens"
        raise DataError(f"{path} has {found}: name the one to put after each document with --eos")
    return known[0]


def tokenise_file(
    path: Path, tokenizer: TextTokenizer, text_field: str, output: Path, on_bytes: Callable[[int], None]
) -> Source:
    """Writes the ids of all documents of `path`, EOS after each, to `output`: flat, `tokenizer.dtype`, no header.

    A document without any token is counted and skipped (a lone EOS would only teach EOS after EOS). `on_bytes` is
    told the bytes of `path` consumed since its last call. The returned counts hold no instances yet.
    Raises DataError as `read_documents` does, and where the tokenizer can only read EOS written in a text as EOS.
    """
    documents = empty = tokens = reported = 0
    with open(output, "wb") as ids_file:
        for chunk in _chunks(read_documents(path, text_field)):
            stream: list[int] = []
            for document, ids in zip(chunk, tokenizer.encode([document.text for document in chunk]), strict=True):
                if tokenizer.eos_id in ids:
                    raise DataError(
                        f"{path}, line {document.line}: the text contains {tokenizer.eos}, which this tokenizer cannot "
                        f"encode as ordinary text: remove it or name another token with --eos"
                    )
                if not ids:
                    empty += 1
                    continue
                documents += 1
                stream += ids
                stream.append(tokenizer.eos_id)
            ids_file.write(np.array(stream, dtype=tokenizer.dtype).tobytes())
            tokens += len(stream)
            on_bytes(chunk[-1].bytes_read - reported)
            reported = chunk[-1].bytes_read
    on_bytes(path.stat().st_size - reported)
    with open(path, "rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    counts = Counts(documents=documents, empty_documents=empty, tokens=tokens)
    return Source(file=str(path), sha256=sha256, counts=counts)


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
    chunk: list[Document] = []
    characters = 0
    for document in documents:
        chunk.append(document)
        characters += len(document.text)
        if characters >= CHUNK_CHARACTERS:
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk
