"""Turns the documents of one file into a flat file of token ids, the EOS token after each document."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from optimus_compiler.runtime.data.documents import Document, LargeText, read_documents
from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.errors import DamagedInputError
from optimus_compiler.runtime.data.files import disk_full_named
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.tokenised import BadDocument, TokenisedFile, TokenWriter, ids_file
from optimus_compiler.runtime.files import sha256_of

PART = 1 << 18  # characters encoded at a time: the library keeps offsets and strings beside the ids
LARGEST_WHOLE = 3 << 20  # most UTF-8 bytes without a place to cut: a byte can be a token, and a token take 200 bytes
CHECK_EVERY = 256  # of so many documents, the first is compared with the reference


def tokenise_file(
    path: Path,
    folder: Path,
    number: int,
    *,
    tokenizer: TextTokenizer,
    encoder: Encoder,
    text_field: str,
    most_bad: int,
    on_bytes: Callable[[int], None],
) -> TokenisedFile:
    """Writes the ids of all documents of `path`, EOS after each, as file `number` of `folder` (see `tokenised`).

    A document without any token is counted and skipped (a lone EOS would only teach EOS after EOS). A bad one is
    recorded and skipped: one that `read_documents` finds bad, one with EOS in its text that the tokenizer can only read
    as EOS, one that cannot be encoded in parts of at most `LARGEST_WHOLE` bytes. `on_bytes` is told the bytes of `path`
    consumed since its last call. Raises DamagedInputError above `most_bad` bad documents, DataError where a sampled
    document is not encoded as the reference does or the disk is full, and OSError.
    """
    bad = _BadDocuments(path, most_bad)
    progress = _Progress(on_bytes)
    read = empty = reference = 0
    with disk_full_named(ids_file(folder, number)), TokenWriter(folder, number, tokenizer.dtype) as writer:
        for batch in _batches(bad.set_aside(read_documents(path, text_field, folder))):
            before = encoder.reference_documents
            for document, parts in zip(batch, _encode(batch, read, encoder), strict=True):
                try:
                    for ids in parts:
                        if tokenizer.eos_id in ids:
                            raise _UnencodableError(
                                f"the text holds {tokenizer.eos}, which this tokenizer cannot encode as ordinary text"
                            )
                        writer.write(ids)
                        if isinstance(document.text, LargeText):
                            progress.reach(document.bytes_read, document.text.share_read)
                except _UnencodableError as error:
                    writer.drop_document()
                    bad.add(document.line, str(error))
                    continue
                if writer.document_tokens:
                    writer.write([tokenizer.eos_id])
                    writer.end_document()
                else:
                    empty += 1
            read += len(batch)
            reference += min(len(batch), encoder.reference_documents - before)  # a large document is many texts
            progress.reach(batch[-1].bytes_read)
        size = path.stat().st_size
        progress.reach(size)
        record = TokenisedFile(
            file=str(path),
            bytes=size,
            sha256=sha256_of(path),
            documents=writer.documents,
            empty_documents=empty,
            tokens=writer.tokens,
            fast_documents=read - reference,
            reference_documents=reference,
            bad_documents=bad.in_order(),
            tokens_sha256=writer.sha256,
        )
        writer.commit(record)
    return record


class _UnencodableError(Exception):
    """Why a document has no ids that could be written."""


class _BadDocuments:
    """The bad documents of a file, as long as they are not too many."""

    def __init__(self, path: Path, most: int) -> None:
        self._path, self._most = path, most
        self._found: list[BadDocument] = []

    def set_aside(self, documents: Iterable[Document | BadDocument]) -> Iterator[Document]:
        """Passes the good ones on."""
        for document in documents:
            if isinstance(document, Document):
                yield document
            else:
                self._append(document)

    def add(self, line: int, cause: str) -> None:
        """Takes one that proved bad later."""
        self._append(BadDocument(file=str(self._path), line=line, cause=cause))

    def _append(self, document: BadDocument) -> None:
        self._found.append(document)
        if len(self._found) > self._most:
            raise DamagedInputError(self.in_order(), self._most, stopped=True)

    def in_order(self) -> tuple[BadDocument, ...]:
        """By line: documents are encoded after later lines have been read."""
        return tuple(sorted(self._found, key=lambda document: document.line))


class _Progress:
    """Tells how many bytes of a file have been consumed."""

    def __init__(self, on_bytes: Callable[[int], None]) -> None:
        self._on_bytes = on_bytes
        self._before = self._done = 0

    def reach(self, position: int, share: float = 1.0) -> None:
        """All bytes up to `position` are consumed, or that share of those since the last call with all of them."""
        done = self._before + int((position - self._before) * share)
        self._on_bytes(max(0, done - self._done))
        self._done = max(done, self._done)
        if share == 1.0:
            self._before = self._done


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    """At most `PART` characters each; a large document stands alone and is given before the next is read."""
    batch: list[Document] = []
    characters = 0
    for document in documents:
        size = _size(document)
        if batch and characters + size > PART:
            yield batch
            batch, characters = [], 0
        if size > PART:
            yield [document]
        else:
            batch.append(document)
            characters += size
    if batch:
        yield batch


def _size(document: Document) -> int:
    # An empty one counts too: it takes memory.
    return PART + 1 if isinstance(document.text, LargeText) else max(1, len(document.text))


def _encode(batch: list[Document], first: int, encoder: Encoder) -> Iterator[Iterable[list[int]]]:
    """The ids of each document, in parts; `first` is how many documents of the file came before."""
    if _size(batch[0]) > PART:
        yield _encode_parts(_pieces(batch[0].text), encoder, check=first % CHECK_EVERY == 0)
        return
    texts = [str(document.text) for document in batch]
    for number, (text, ids) in enumerate(zip(texts, encoder.encode(texts), strict=True), first):
        if number % CHECK_EVERY == 0:
            encoder.check(text, ids)
        yield [ids]


def _pieces(text: str | LargeText) -> Iterable[str]:
    return text if isinstance(text, LargeText) else (text[at : at + PART] for at in range(0, len(text), PART))


def _encode_parts(pieces: Iterable[str], encoder: Encoder, check: bool) -> Iterator[list[int]]:
    start_text, start_ids = "", list[int]()  # checked together, and the cut with them
    for number, part in enumerate(_parts(pieces, encoder)):
        [ids] = encoder.encode([part])
        if check and number < 2 and _bytes(start_text + part) <= LARGEST_WHOLE:
            start_text, start_ids = start_text + part, start_ids + ids
            encoder.check(start_text, start_ids)
        yield ids


def _parts(pieces: Iterable[str], encoder: Encoder) -> Iterator[str]:
    """Cuts a text where its parts have the ids of the whole: to `PART` characters, or as soon after as that is so."""
    held = ""
    for piece in pieces:
        held += piece
        while len(held) > PART:
            cut = encoder.safe_cut(held, PART) or encoder.safe_cut(held, len(held))
            if _bytes(held[:cut]) > LARGEST_WHOLE:
                raise _UnencodableError(
                    f"more than {LARGEST_WHOLE} bytes of the text can only be encoded as a whole by this tokenizer"
                )
            if cut is None:
                break
            yield held[:cut]
            held = held[cut:]
    yield held


def _bytes(text: str) -> int:
    return len(text.encode("utf-8"))
