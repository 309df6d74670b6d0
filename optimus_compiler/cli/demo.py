"""`optimus demo`: the whole path on text that every machine has, from source files to sampled text."""

from __future__ import annotations

import json
import shutil
import sysconfig
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from optimus_compiler.cli.export import export
from optimus_compiler.cli.pretrain import train_with_progress

VOCABULARY = 4096
CONTEXT_LENGTH = 256
END_OF_TEXT = "<|endoftext|>"
PROMPT = "def"
SAMPLE_BYTES = 3_000_000  # of text for the tokenizer: more changes little and takes longer
OTHER_CODE = {"test", "tests", "idle_test", "site-packages", "dist-packages"}

# A small OLMoE that learns something visible within minutes on two CPU cores.
CONFIG = """\
[model]
name = "olmoe-tiny"

[model.overrides]
vocab_size = {vocabulary}
hidden_size = 256
intermediate_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_experts = 16
num_experts_per_tok = 4
max_position_embeddings = {context_length}

[data]
path = {data}

[train]
steps = {steps}
micro_batch_size = 4
precision = "fp32"

[optimizer]
lr = 1e-3
min_lr = 1e-4

[log]
every = 20
"""


def demo(
    output: Annotated[Path, typer.Option(help="Folder for everything the demo makes.")] = Path("demo-run"),
    steps: Annotated[int, typer.Option(help="Training steps.")] = 450,
) -> None:
    """Pretrain a small OLMoE, end to end.

    The text is the sources of this Python's standard library; it takes a few minutes on two cores.

    \b
    Example:
      optimus demo --output demo-run
    """
    from optimus_compiler.config import load_config
    from optimus_compiler.runtime.data.prepare import prepare
    from optimus_compiler.runtime.generate import sample
    from optimus_compiler.runtime.metrics import read_metrics
    from optimus_compiler.runtime.plot import plot_runs
    from optimus_compiler.runtime.run import open_run

    started = time.perf_counter()
    _make_folder(output)

    _heading("Text: the sources of Python's standard library")
    texts = list(standard_library())
    corpus = output / "stdlib.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    print(f"{corpus}: {len(texts):,} files, {sum(map(len, texts)) / 1e6:.1f} M characters")

    _heading(f"Tokenizer: byte-level BPE with {VOCABULARY:,} tokens")
    tokenizer = output / "tokenizer.json"
    train_tokenizer(texts, tokenizer)
    print(tokenizer)

    _heading(f"optimus prepare: tokens, shuffled sequences of {CONTEXT_LENGTH}")
    manifest = prepare([corpus], tokenizer=tokenizer, context_length=CONTEXT_LENGTH, output=output / "data")
    print(f"{output / 'data'}: {manifest.counts.tokens:,} tokens, {manifest.counts.instances:,} sequences")

    _heading("optimus pretrain: capture, fuse, compile with Inductor, train")
    config = output / "demo.toml"
    config.write_text(
        CONFIG.format(
            vocabulary=VOCABULARY,
            context_length=CONTEXT_LENGTH,
            steps=steps,
            data=json.dumps(str(output / "data")),
        ),
        encoding="utf-8",
    )
    run = open_run(load_config(config), output / "run")
    compiled = train_with_progress(run)
    metrics = read_metrics(run.directory)
    last = metrics[-10:]
    mean = sum(step.loss for step in last) / len(last)
    print(f"loss: {metrics[0].loss:.2f} at step 1, {mean:.2f} over the last {len(last)} of {len(metrics):,} steps")

    _heading(f"Text sampled after {PROMPT!r}")
    vocabulary = run.data.tokenizer()
    samples = sample(
        compiled,
        vocabulary.encode(PROMPT, add_special_tokens=False).ids,
        count=run.config.train.micro_batch_size,
        new_tokens=60,
        sequence_length=CONTEXT_LENGTH,
    )
    print("\n---\n".join(vocabulary.decode(ids).strip() for ids in samples[:3].tolist()))

    _heading("optimus export: the trained model as a Hugging Face folder")
    export(run.directory, output / "exported")

    _heading("optimus plot")
    plot_runs([run.directory], output / "metrics.png")
    peak = metrics[-1].peak_memory / 2**30
    print(f"{output / 'metrics.png'}; {time.perf_counter() - started:.0f} s in all, peak memory {peak:.1f} GiB")


def _make_folder(output: Path) -> None:
    """An empty folder; one that an earlier demo filled is cleared, anything else is left alone."""
    if (output / "tokenizer.json").is_file() and (output / "stdlib.jsonl").is_file():
        shutil.rmtree(output)
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ValueError(f"{output} exists and was not made by the demo: give another --output")
    output.mkdir(parents=True, exist_ok=True)


def standard_library() -> Iterable[str]:
    """The text of every .py file of the running Python's standard library, without its tests, in a fixed order."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(file for file in folder.rglob("*.py") if not OTHER_CODE & set(file.relative_to(folder).parts))
    if not files:
        raise ValueError(f"{folder} holds no .py file: run the demo with a Python that has its sources")
    for file in files:
        yield file.read_text(encoding="utf-8", errors="replace")


def train_tokenizer(texts: list[str], output: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    stride = max(1, sum(map(len, texts)) // SAMPLE_BYTES)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts[::stride], trainer)
    tokenizer.save(str(output))


def _heading(text: str) -> None:
    from rich.console import Console

    Console().rule(f"[bold]{text}", align="left")
