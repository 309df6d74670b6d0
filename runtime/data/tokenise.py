"""Turns the documents of one file into flat files of token ids, one a split, the EOS token after each document."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from optimus_compiler.runtime.data.documents import Document, LargeText, read_documents
from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.errors import DamagedInputError
from optimus_compiler.runtime.data.files import disk_full_named
from optimus_compiler.runtime.data.manifest import Split
from optimus_compiler.runtime.data.split import split_of
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer
from optimus_compiler.runtime.data.tokenised import BadDocument, TokenisedFile, TokenWriter, ids_file
from optimus_compiler.runtime.files import sha256_of

PART = 1 << 18  # characters encoded at a time: the library keeps offsets and strings beside the ids
LARGEST_WHOLE = 3 << 20  # most UTF-8 bytes without a place to cut: a byte can be a token, and a token take 200 bytes
CHECK_EVERY = 256  # of so many documents, the first is compared with the reference


def tokenise_file(
    path: Path,
    folders: Mapping[Split, Path],
    number: int,
    *,
    tokenizer: TextTokenizer,
    encoder: Encoder,
    text_field: str,
    validation_fraction: float,
    most_bad: int,
    on_bytes: Callable[[int], None],
) -> dict[Split, TokenisedFile]:
    """Writes the ids of the documents of `path`, EOS after each, as file `number` of the folder of their split.

    `tokenised` says what the files are. Documents of a split without a folder are passed over. A document without any
    token is counted and skipped (a lone EOS would only teach EOS after EOS). A bad one is recorded and skipped: one
    that `read_documents` finds bad, which has no text to decide its split and counts as training; one with EOS in its
    text that the tokenizer can only read as EOS; one that cannot be encoded in parts of at most `LARGEST_WHOLE` bytes.
    `on_bytes` is told the bytes of `path` consumed since its last call. Raises DamagedInputError above `most_bad` bad
    documents, DataError where a sampled document is not encoded as the reference does or the disk is full, and OSError.
    """
    bad = _BadDocuments(path, most_bad, folders)
    progress = _Progress(on_bytes)
    scratch = next(iter(folders.values()))
    written = " or ".join(str(ids_file(folder, number)) for folder in folders.values())
    with disk_full_named(written), ExitStack() as stack:
        outputs = {
            split: _Output(stack.enter_context(TokenWriter(folder, number, tokenizer.dtype)))
            for split, folder in folders.items()
        }
        good = bad.set_aside(read_documents(path, text_field, scratch))
        divided = ((split_of(document.text, validation_fraction), document) for document in good)
        for split, batch in _batches(each for each in divided if each[0] in folders):
            output, writer = outputs[split], outputs[split].writer
            before = encoder.reference_documents
            for document, parts in zip(batch, _encode(batch, output.read, encoder), strict=True):
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
                    bad.add(split, document.line, str(error))
                    continue
                if writer.document_tokens:
                    writer.write([tokenizer.eos_id])
                    writer.end_document()
                else:
                    output.empty += 1
            output.read += len(batch)
            output.reference += min(len(batch), encoder.reference_documents - before)  # a large document is many texts
            progress.reach(batch[-1].bytes_read)
        size = path.stat().st_size
        progress.reach(size)
        sha256 = sha256_of(path)
        records = {
            split: TokenisedFile(
                file=str(path),
                bytes=size,
                sha256=sha256,
                documents=output.writer.documents,
                empty_documents=output.empty,
                tokens=output.writer.tokens,
                fast_documents=output.read - output.reference,
                reference_documents=output.reference,
                bad_documents=bad.of(split),
                tokens_sha256=output.writer.sha256,
            )
            for split, output in outputs.items()
        }
        for split, record in records.items():
            outputs[split].writer.commit(record)
    return records


@dataclass
class _Output:
    """What a split gets of a file, and the documents counted: read, without a token, encoded by the reference."""

    writer: TokenWriter
    read: int = 0
    empty: int = 0
    reference: int = 0


class _UnencodableError(Exception):
    """Why a document has no ids that could be written."""


class _BadDocuments:
    """The bad documents of a file in the splits that are written, as long as they are not too many."""

    def __init__(self, path: Path, most: int, splits: Collection[Split]) -> None:
        self._path, self._most = path, most
        self._found: dict[Split, list[BadDocument]] = {split: [] for split in splits}

    def set_aside(self, documents: Iterable[Document | BadDocument]) -> Iterator[Document]:
        """Passes the good ones on."""
        for document in documents:
            if isinstance(document, Document):
                yield document
            elif "training" in self._found:
                self._append("training", document)

    def add(self, split: Split, line: int, cause: str) -> None:
        """Takes one that proved bad later."""
        self._append(split, BadDocument(file=str(self._path), line=line, cause=cause))

    def _append(self, split: Split, document: BadDocument) -> None:
        self._found[split].append(document)
        if sum(map(len, self._found.values())) > self._most:
            raise DamagedInputError(self.of(*self._found), self._most, stopped=True)

    def of(self, *splits: Split) -> tuple[BadDocument, ...]:
        """Those of `splits` by line: documents are encoded after later lines have been read."""
        found = (document for split in splits for document in self._found[split])
        return tuple(sorted(found, key=lambda document: document.line))


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


def _batches(documents: Iterable[tuple[Split, Document]]) -> Iterator[tuple[Split, list[Document]]]:
    """At most `PART` characters of one split each; a large document stands alone, given before the next is read."""
    batches: defaultdict[Split, list[Document]] = defaultdict(list)
    characters = Counter[Split]()
    for split, document in documents:
        size = _size(document)
        if split in batches and characters[split] + size > PART:
            yield split, batches.pop(split)
            del characters[split]
        if size > PART:
            yield split, [document]
        else:
            batches[split].append(document)
            characters[split] += size
    yield from batches.items()


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
