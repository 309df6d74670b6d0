"""Tokens per CPU second of our encoder beside Hugging Face's encode_batch_fast, on a sample of the corpus."""

import gzip
import json
import os
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import pytest

from optimus_compiler.runtime.data.encode import Encoder
from optimus_compiler.runtime.data.text_tokenizer import TextTokenizer

SHARED = Path(__file__).parents[1] / "../shared"
EVERY = int(os.environ.get("BENCH_EVERY", "24"))  # the sample is every so manieth document of each file
BATCH_CHARACTERS = 1 << 18  # as `optimus prepare` does
ROUNDS = 5


def sample() -> Iterator[list[str]]:
    """Batches of documents."""
    batch: list[str] = []
    for path in sorted((SHARED / "corpus").glob("*.json.gz")):
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in islice(lines, 0, None, EVERY):
                batch.append(json.loads(line)["text"])
                if sum(map(len, batch)) > BATCH_CHARACTERS:
                    yield batch
                    batch = []
    yield batch


def test_tokens_per_cpu_second(interleave: Callable[..., tuple], publish: Callable[..., None]) -> None:
    if not SHARED.exists():
        pytest.skip(f"{SHARED} is absent")
    pytest.importorskip("tiktoken")
    tokenizer = TextTokenizer.load(SHARED / "tokenizer/olmoe.json").tokenizer
    start = time.process_time()
    encoder = Encoder(tokenizer)
    building = time.process_time() - start
    batches = list(sample())
    tokens = 0
    for batch in batches:
        ids = encoder.encode(batch)
        assert ids == encoder.reference(batch)
        tokens += sum(map(len, ids))
    fast, left = encoder.fast_documents, encoder.reference_documents

    def hugging_face() -> None:
        for batch in batches:
            tokenizer.encode_batch_fast(batch, add_special_tokens=False)  # its ids, not even fetched

    def ours() -> None:
        for batch in batches:
            encoder.encode(batch)

    variants = {"encode_batch_fast": hugging_face, "ours": ours}
    _, cpu = interleave(variants, ROUNDS)

    publish(
        "tokenise",
        f"{tokens:,} tokens of {fast + left:,} documents, identical; {left} left to Hugging Face by ours, which is "
        f"built in {building:.2f} CPU s; medians of {ROUNDS} interleaved rounds",
        ["variant", "M tokens / CPU s", "x ours"],
        [[name, f"{tokens / cpu[name] / 1e3:.2f}", f"{cpu[name] / cpu['ours']:.2f}"] for name in variants],
    )
