"""Bodies that come packed: taken in the two encodings that are served, refused in words of ours in any other."""

from __future__ import annotations

import gzip
import zlib

import pytest

from gateway.encodings import TooLarge, unpack
from gateway.errors import ApiError

BODY = b'{"model": "tiny"}' * 50
GZIP, ZLIB = gzip.compress(BODY), zlib.compress(BODY)
RAW = ZLIB[2:-4]


@pytest.mark.parametrize(
    ("sent", "encoding", "meant"),
    [
        (BODY, "identity", BODY),
        (GZIP, "gzip", BODY),
        (GZIP, " GZIP ", BODY),
        (GZIP + GZIP, "x-gzip", BODY + BODY),
        (ZLIB, "deflate", BODY),
        (RAW, "deflate", BODY),
        (b"", "gzip", b""),
    ],
    ids=["plain", "gzip", "upper case", "two members", "deflate", "raw deflate", "empty"],
)
def test_a_packed_body_is_what_was_packed(sent: bytes, encoding: str, meant: bytes) -> None:
    assert unpack(sent, encoding, len(meant)) == meant


@pytest.mark.parametrize(
    ("sent", "encoding", "said"),
    [
        (BODY, "br", "'br' is not known here"),
        (BODY, "gzip, gzip", "'gzip, gzip' is not known here"),
        (BODY, "x" * 5000, "xxx…"),
        (BODY, "gzip", "is not gzip"),
        (BODY, "deflate", "is not deflate"),
        (GZIP[:-9], "gzip", "breaks off before its gzip ends"),
        (GZIP[:-1] + b"\x77", "gzip", "is not gzip"),
        (GZIP + b"more", "gzip", "is not gzip"),
    ],
    ids=["unknown", "two", "long", "no gzip", "no deflate", "cut", "flipped", "more behind"],
)
def test_any_other_is_refused_and_told_what_is_taken(sent: bytes, encoding: str, said: str) -> None:
    with pytest.raises(ApiError) as caught:
        unpack(sent, encoding, 1 << 20)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, "invalid_body", "Content-Encoding")
    assert said in error.message and "gzip and deflate are taken" in error.message
    assert len(error.message) < 300


def test_little_that_stands_for_much_is_not_unpacked() -> None:
    bomb = gzip.compress(b"\0" * (64 << 20), 1)
    with pytest.raises(TooLarge):
        unpack(bomb, "gzip", 1 << 20)
    assert unpack(GZIP, "gzip", len(BODY)) == BODY
    for limit in (len(BODY) - 1, 0):
        with pytest.raises(TooLarge):
            unpack(GZIP, "gzip", limit)
    with pytest.raises(TooLarge):
        unpack(GZIP + GZIP, "gzip", 2 * len(BODY) - 1)
