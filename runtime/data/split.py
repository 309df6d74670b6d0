"""Which documents are held out for validation: their text alone decides."""

import hashlib

from optimus_compiler.runtime.data.documents import LargeText
from optimus_compiler.runtime.data.manifest import Split


def split_of(text: str | LargeText, validation_fraction: float) -> Split:
    """The split that a document of `text` belongs to: validation where the hash of it is below the fraction.

    So equal documents are on one side, however a corpus is divided into files and in whatever order it is read, and a
    larger fraction holds out all that a smaller one does.
    """
    if not validation_fraction:
        return "training"
    hashed = hashlib.blake2b(digest_size=8)
    for piece in [text] if isinstance(text, str) else text:
        hashed.update(piece.encode("utf-8"))
    return "validation" if int.from_bytes(hashed.digest(), "big") < validation_fraction * 2**64 else "training"
