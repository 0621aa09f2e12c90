"""A client that reads slowly or not at all: bounded memory, no event lost, nobody else held up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.messages import Sampling, pack_tokens
from gateway import journal as j
from gateway.delivery import BUFFER_LIMIT_BYTES, SseReader
from gateway.sse import EventForm
from gateway.streams import Stream
from gateway.tokenizer import TokenIdText


class Transport:
    """A socket that takes nothing until it is told to."""

    def __init__(self) -> None:
        self.buffered = 0
        self.data = b""

    def get_write_buffer_size(self) -> int:
        return self.buffered

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.buffered += len(data)
        self.data += data


def make() -> tuple[Stream, SseReader, Transport]:
    codec = TokenIdText()
    spec = j.StreamSpec("0" * 24, "text", 1, "tiny", pack_tokens([10]), Sampling(), [], [], 9999)
    stream = Stream(spec, codec, None)
    transport = Transport()
    request: Any = SimpleNamespace(transport=transport, version=(1, 0))
    return stream, SseReader(stream, EventForm(codec), request, 0), transport


async def test_stalled_client_holds_a_bounded_buffer_and_gets_all_of_it_later() -> None:
    stream, reader, transport = make()
    for k in range(5000):
        stream.apply(j.Tokens(1 + k, pack_tokens([k])))
        reader.advance()
    assert reader.stalled and reader.wake.is_set()
    assert transport.buffered < BUFFER_LIMIT_BYTES + 256 * 400
    stream.apply(j.End("stop", "stop", 1.0))
    while not reader.done:
        transport.buffered, reader.stalled = 0, False
        reader.advance()
    ids = [int(line[4:]) for line in transport.data.decode().split("\n") if line.startswith("id: ")]
    assert ids == list(range(5003))


async def test_comment_is_not_forced_on_a_client_that_is_behind() -> None:
    _, reader, transport = make()
    reader.comment("hello")
    reader.stalled = True
    reader.comment("again")
    assert transport.data == b": hello\n\n"
