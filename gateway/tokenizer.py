"""Text <-> token ids. Admit (text in) and deliver (tokens out) stand on it; runs on the event loop, imports no torch.

A model directory with `tokenizer.json` gets `TextTokenizer`. One without gets `TokenIdText`: its text is the ids
themselves, " 17 203", so that a seeded tiny model can be driven and compared by token ids through the same API.
"""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import msgspec
from tokenizers import Tokenizer, decoders

from gateway.errors import bad_request

# How SentencePiece's vocabularies spell a space, and a byte that is no token's text; those of byte-level BPE have other ways.
SPACE = "\u2581"
BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TextCodec(Protocol):
    """What the rest of the gateway needs of a tokenizer."""

    has_chat: bool
    has_text: bool  # False: what stands for text is token ids

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        """Token ids of a text; add_special lets the model's post-processor add its begin token."""

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        """Text of a run of tokens, special tokens left out unless `special`; bytes that are no UTF-8 (yet) become U+FFFD."""

    def token_text(self, token: int) -> str:
        """Text of one token alone, special tokens shown."""

    def token_bytes(self, token: int) -> bytes:
        """Bytes that one token adds to the text."""


class TextTokenizer:
    """A `tokenizers.Tokenizer` of the model."""

    has_chat = True
    has_text = True

    def __init__(self, path: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(path))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._alphabet = _byte_alphabet() if isinstance(self._tokenizer.decoder, decoders.ByteLevel) else None

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=add_special).ids

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=not special)

    def token_text(self, token: int) -> str:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        piece = self._tokenizer.id_to_token(token) or ""
        spaces = 0 if self._alphabet is not None else len(piece) - len(piece.lstrip(SPACE))
        return " " * spaces + text.lstrip(" ") if spaces else text  # many decoders strip a space that begins a text

    def token_bytes(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token) or ""
        if self._alphabet is not None and all(c in self._alphabet for c in piece):
            return bytes(self._alphabet[c] for c in piece)
        byte, text = BYTE_PIECE.fullmatch(piece), self.token_text(token)
        return bytes.fromhex(byte[1]) if byte and text != piece else text.encode()


class TokenIdText:
    """No tokenizer: text is ids separated by spaces. `decode` of a part is a part of the text, as with real text."""

    has_chat = False
    has_text = False

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError as error:
            hint = "this model has no tokenizer.json, so a prompt is token ids separated by spaces, or a list of ids"
            raise bad_request(f"prompt: {hint}", "prompt") from error

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        return "".join(f" {token}" for token in tokens)

    def token_text(self, token: int) -> str:
        return f" {token}"

    def token_bytes(self, token: int) -> bytes:
        return f" {token}".encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE (GPT-2's table): printable bytes stand for themselves, the others follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


def load_tokenizer(model_dir: Path) -> TextCodec:
    """The tokenizer of a model directory, or the fallback if it has none."""
    path = model_dir / "tokenizer.json"
    return TextTokenizer(path) if path.exists() else TokenIdText()


class ModelFacts(msgspec.Struct, frozen=True):
    """What the gateway must know of a model before any engine is up. 0 means unknown."""

    stop_tokens: list[int]
    context_tokens: int
    vocab_count: int


def read_model_facts(model_dir: Path) -> ModelFacts:
    """Stop tokens from generation_config.json, else config.json (also nested `text_config`); context and vocabulary from config.json."""
    config = _read_json(model_dir / "config.json")
    config = {**config, **config.get("text_config", {})}
    eos = _read_json(model_dir / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    stops = [] if eos is None else eos if isinstance(eos, list) else [eos]
    context = int(config.get("max_position_embeddings") or 0)
    return ModelFacts([int(s) for s in stops], context, int(config.get("vocab_size") or 0))


def _read_json(path: Path) -> dict:
    return msgspec.json.decode(path.read_bytes()) if path.exists() else {}
