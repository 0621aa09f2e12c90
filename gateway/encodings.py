"""A body as it was sent -> as it was meant: `Content-Encoding`, bounded. Stage: admit; pure, beside the event loop.

Here and not in aiohttp, which ignores encodings that it doesn't know and answers broken ones in words of its own.
"""

from __future__ import annotations

import zlib

from gateway.errors import ApiError, bad_request, quoted

_TAKEN = "gzip and deflate are taken; send it as one of these, or as it is"
_GZIP_BITS, _ZLIB_BITS, _RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS


class TooLarge(Exception):
    """More bytes than the limit are packed in it."""


def unpack(body: bytes, encoding: str, limit_bytes: int) -> bytes:
    """The body that was packed as `encoding` says, the header's value.

    Raises  ApiError `invalid_body` (an encoding that isn't taken, or the body is not in it), TooLarge
    """
    match encoding.strip().lower():
        case "" | "identity":
            return body
        case "gzip" | "x-gzip":
            return _inflate(body, "gzip", _GZIP_BITS, limit_bytes)
        case "deflate":
            return _inflate(body, "deflate", _ZLIB_BITS if _has_zlib_header(body) else _RAW_BITS, limit_bytes)
    raise _refused(f"{quoted(encoding)} is not known here")


def _inflate(body: bytes, name: str, window_bits: int, limit_bytes: int) -> bytes:
    parts, left, room = [], body, limit_bytes + 1
    while left:  # gzip may be several members in a row
        unpacker = zlib.decompressobj(window_bits)
        try:
            part = unpacker.decompress(left, room)
        except zlib.error as error:
            raise _refused(f"the body is not {name}") from error
        parts.append(part)
        room -= len(part)
        if room <= 0:
            raise TooLarge
        if not unpacker.eof:
            raise _refused(f"the body breaks off before its {name} ends")
        left = unpacker.unused_data
    return b"".join(parts)


def _has_zlib_header(body: bytes) -> bool:
    """RFC 1950, as `deflate` is meant; some clients send RFC 1951's, without a header."""
    return len(body) > 1 and body[0] & 0x0F == 8 and int.from_bytes(body[:2], "big") % 31 == 0


def _refused(trouble: str) -> ApiError:
    return bad_request(f"Content-Encoding: {trouble}; {_TAKEN}", "Content-Encoding", "invalid_body")
