"""What one token alone is: its text and its bytes, as log probabilities tell them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models

from gateway.tokenizer import TextTokenizer
from tests.gateway.conftest import byte_tokenizer

PIECES = ["<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581\u2581", "\u2581Hello", "Hello"]
REPLACE, BYTES, STRIP = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0)


def codec(tokenizer: Tokenizer, directory: Path) -> TextTokenizer:
    tokenizer.save(str(directory / "tokenizer.json"))
    return TextTokenizer(directory / "tokenizer.json")


@pytest.mark.parametrize("decoder", [[REPLACE, BYTES, decoders.Fuse()], [REPLACE, BYTES, decoders.Fuse(), STRIP]])
def test_a_token_of_sentencepiece_has_its_space_and_its_byte(decoder: list[decoders.Decoder], tmp_path: Path) -> None:
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.decoder = decoders.Sequence(decoder)
    made = codec(tokenizer, tmp_path)
    texts = [made.token_text(vocab[piece]) for piece in PIECES[-4:]]
    assert texts == [" ", "  ", " Hello", "Hello"]
    assert [made.token_bytes(vocab[piece]).decode() for piece in PIECES[-4:]] == texts
    assert b"".join(made.token_bytes(vocab[f"<0x{byte:02X}>"]) for byte in "é".encode()).decode() == "é"
    assert made.token_bytes(vocab["<s>"]) == b"<s>"


def test_a_token_of_byte_level_bpe_has_its_bytes(tmp_path: Path) -> None:
    made = codec(byte_tokenizer(), tmp_path)
    assert b"".join(made.token_bytes(4 + byte) for byte in " é".encode()).decode() == " é"
    assert (made.token_text(4 + ord(" ")), made.token_text(0)) == (" ", "<s>")
