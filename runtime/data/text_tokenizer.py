"""Loads a tokenizer.json so that it reads documents as ordinary text, and finds its end-of-document token."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer

from optimus_compiler.runtime.data.errors import DataError
from optimus_compiler.runtime.data.files import whole_file
from optimus_compiler.runtime.data.manifest import TOKENIZER

EOS_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]")


@dataclass(frozen=True)
class TextTokenizer:
    """A Hugging Face `tokenizers` tokenizer that reads every character of a document as ordinary text."""

    path: Path
    tokenizer: Tokenizer
    vocab_size: int  # largest id + 1: ids may have holes
    eos: str
    eos_id: int
    sha256: str  # of the JSON file

    @property
    def dtype(self) -> np.dtype:
        """The smallest unsigned type that holds every id: little-endian uint16 up to 65,536 ids, else uint32."""
        return np.dtype("<u2" if self.vocab_size <= 1 << 16 else "<u4")

    def copy(self, folder: Path) -> None:
        """Writes the JSON file into `folder` as tokenizer.json; raises DataError when it has changed since `load`."""
        with whole_file(folder / TOKENIZER) as file:
            file.write(self.path.read_bytes())
        if file.sha256 != self.sha256:
            raise DataError(f"{self.path} was changed while it was used: restore it and run the same command again")

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
            path, tokenizer, max(vocabulary.values()) + 1, eos, vocabulary[eos], hashlib.sha256(data).hexdigest()
        )


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
