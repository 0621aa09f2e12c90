"""Framing of `engine/messages.py` on a stream socket: 4-byte little-endian length, then msgpack. No torch here.

`FrameBuffer` takes bytes in any cut and gives whole frames; it serves the engine's step loop (non-blocking socket)
and the gateway's asyncio protocol alike. Runs on the thread that owns the socket.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from engine import messages as m

FRAME_LIMIT_BYTES = 256 << 20
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
TO_ENGINE = msgspec.msgpack.Decoder(m.ToEngine)
FROM_ENGINE = msgspec.msgpack.Decoder(m.FromEngine)
TO_HOST = msgspec.msgpack.Decoder(m.ToHost)
FROM_HOST = msgspec.msgpack.Decoder(m.FromHost)


class WireError(Exception):
    """The peer sent what can't be a frame; close the connection and attach again."""


def encode(message: m.Message) -> bytes:
    """One message as a whole frame."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


class FrameBuffer:
    """Bytes in, messages out. `decoder` is one of the decoders above."""

    def __init__(self, decoder: msgspec.msgpack.Decoder[Any]) -> None:
        self._decoder = decoder
        self._data = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Add received bytes; return the messages that are now whole. Raises WireError on garbage."""
        self._data += data
        messages = []
        start = 0
        while len(self._data) - start >= 4:
            (length,) = _LENGTH.unpack_from(self._data, start)
            if length > FRAME_LIMIT_BYTES:
                raise WireError(f"frame of {length} bytes is over the limit of {FRAME_LIMIT_BYTES}")
            if len(self._data) - start - 4 < length:
                break
            body = bytes(self._data[start + 4 : start + 4 + length])
            try:
                messages.append(self._decoder.decode(body))
            except msgspec.MsgspecError as error:
                raise WireError(f"not a message: {error}") from error
            start += 4 + length
        if start:
            del self._data[:start]
        return messages
