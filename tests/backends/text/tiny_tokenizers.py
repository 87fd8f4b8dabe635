"""Tokenizers trained on a few lines, in a second of nothing: byte-level, sentencepiece-like and WordPiece."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog. Stop here, or stop there; 1 12 123.",
    "def stop(x):\n    return x + 1\n\nEND of the story, the end.",
    "Le café est déjà fermé. 你好，世界。 Привет мир! 🙂🙂",
] * 4

SPECIAL = ["<|end|>", "<|im_start|>", "<|im_end|>"]


@cache
def byte_level() -> Tokenizer:
    """With special tokens, and an added one that isn't special and not spelt in the byte alphabet."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<思考>", special=False), AddedToken("<tool call>", special=False)])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """As Llama 2: the first piece of a text loses its leading space, unknown characters become byte pieces."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    letters = sorted(set("".join(TEXT[:2]).replace(" ", "▁")))
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<unk>", "<s>", "</s>", *bytes_], initial_alphabet=letters,
        limit_alphabet=len(letters), show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator([line.replace(" ", "▁") for line in TEXT[:2]], trainer)
    return _with_plain_bytes(tokenizer, bytes_)


def _with_plain_bytes(tokenizer: Tokenizer, bytes_: list[str]) -> Tokenizer:
    """Byte pieces are ordinary entries of the vocabulary, as in sentencepiece; the trainer made them special."""
    import json

    parts = json.loads(tokenizer.to_str())
    parts["added_tokens"] = [token for token in parts["added_tokens"] if token["content"] not in bytes_]
    parts["post_processor"] = None
    rebuilt = Tokenizer.from_str(json.dumps(parts))
    rebuilt.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rebuilt.token_to_id("<s>"))]
    )
    return rebuilt


@cache
def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer
