"""A small byte-level tokenizer, trained on the texts that a test uses."""

from collections.abc import Iterable, Sequence

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers


def train_byte_level(
    texts: Iterable[str],
    vocab_size: int,
    special_tokens: Sequence[str],
    normalizer: normalizers.Normalizer | None = None,
) -> Tokenizer:
    """Byte-level BPE as GPT-2 has it; ids 0, 1, ... are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer
