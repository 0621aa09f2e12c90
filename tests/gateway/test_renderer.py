"""Tokens to text: whatever the cut, the pieces are the whole; nothing of a stop string is ever shown."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.renderer import Renderer, text_offsets
from gateway.tokenizer import TokenIdText
from tests.gateway.conftest import byte_tokenizer

_TOKENIZER = byte_tokenizer()


class Bytes:
    """One token a byte, ids 4 + byte; 0 to 3 are special."""

    has_chat = True

    def encode(self, text: str, *, add_special: bool) -> list[int]:
        return [4 + byte for byte in text.encode()]

    def decode(self, tokens: list[int], *, special: bool = False) -> str:
        return _TOKENIZER.decode(tokens, skip_special_tokens=not special)

    def token_text(self, token: int) -> str:
        return self.decode([token])

    def token_bytes(self, token: int) -> bytes:
        return bytes([token - 4])


def render(tokens: list[int], stops: list[str], prompt: list[int] | None = None) -> tuple[list[str], str, bool]:
    renderer = Renderer(Bytes(), prompt or [70, 71], stops)
    deltas = []
    for token in tokens:
        deltas.append(renderer.push(token))
        if renderer.stopped:
            break
    return deltas, renderer.finish(), renderer.stopped


def ids(text: str) -> list[int]:
    return Bytes().encode(text, add_special=False)


def test_a_stop_string_can_be_shown_and_nothing_behind_it() -> None:
    for stops, text in (["stop"], "a stop"), (["op", "stop"], "a stop"), (["st", "stop"], "a st"), (["x"], "a stop b"):
        renderer = Renderer(Bytes(), [70, 71], stops, stop_shown=True)
        said = ""
        for token in ids("a stop b"):
            if not renderer.stopped:
                said += renderer.push(token)
        assert said + renderer.finish() == text
    renderer = Renderer(TokenIdText(), [1, 2], ["9"], stop_shown=True)
    assert renderer.push(1980) + renderer.finish() == " 19", "also within a token"


@settings(max_examples=150)
@given(st.text(max_size=40))
def test_pieces_are_the_whole_text(text: str) -> None:
    deltas, tail, _ = render(ids(text), [])
    assert "".join(deltas) + tail == text
    assert not any("\ufffd" in delta for delta in deltas if "\ufffd" not in text)


@settings(max_examples=150)
@given(st.lists(st.integers(0, 259), max_size=60), st.lists(st.integers(0, 259), max_size=6))
def test_any_tokens_after_any_prompt_render_the_same_twice_and_lose_no_ascii(
    tokens: list[int], prompt: list[int]
) -> None:
    first, again = render(tokens, [], [70, *prompt, 70]), render(tokens, [], [70, *prompt, 70])
    assert first == again
    text = "".join(first[0]) + first[1]
    ascii_wanted = [token - 4 for token in tokens if 4 <= token < 132]
    assert [ord(c) for c in text if ord(c) < 128] == ascii_wanted


@pytest.mark.process
@settings(max_examples=200)
@given(st.text("abé€😀", max_size=30), st.lists(st.text("abé€", min_size=1, max_size=3), min_size=1, max_size=4))
def test_text_ends_right_before_the_first_stop_string_that_is_complete(text: str, stops: list[str]) -> None:
    deltas, tail, stopped = render(ids(text), stops)
    shown = "".join(deltas) + tail
    ends = [min(text.find(stop), len(text)) + len(stop) for stop in stops if stop in text]
    if not ends:
        assert (shown, stopped) == (text, False)
        return
    first_complete = text[: min(ends)]
    assert stopped
    assert shown == first_complete[: min(first_complete.find(stop) for stop in stops if stop in first_complete)]
    assert all(not shown.endswith(stop) for stop in stops if stop not in shown)


def test_character_is_held_until_it_is_whole() -> None:
    assert render(ids("é€😀"), [])[0] == ["", "é", "", "", "€", "", "", "", "😀"]


def test_possible_stop_string_is_held_and_let_go_when_it_is_none() -> None:
    assert render(ids("xEN!"), ["END"]) == (["x", "", "", "EN!"], "", False)
    assert render(ids("xEN"), ["END"]) == (["x", "", ""], "EN", False)
    assert render(ids("xENDy"), ["END"]) == (["x", "", "", ""], "", True)


def test_bytes_that_never_become_text_are_shown_as_such_in_time() -> None:
    deltas, tail, _ = render([4 + 0xFF] * 40 + ids("ok"), [])
    assert "".join(deltas) + tail == "\ufffd" * 40 + "ok"
    assert any(deltas[:20])


def test_special_tokens_have_no_text() -> None:
    assert render([0, *ids("a"), 0, 2, *ids("é"), 3], []) == (["", "a", "", "", "", "é", ""], "", False)


def test_token_id_text_is_ids() -> None:
    renderer = Renderer(TokenIdText(), [1, 2], [" 9"])
    assert [renderer.push(token) for token in (17, 203, 5)] == [" 17", " 203", " 5"]


def test_offsets_of_a_prompt_pass_over_what_the_tokenizer_added() -> None:
    sent = [0, *ids("a"), 0, *ids("é!")]
    assert text_offsets(Bytes(), sent, "a<s>é!") == [0, 0, 1, 4, 4, 5], (
        "its own beginning, and not the one that was sent"
    )
    assert text_offsets(Bytes(), sent, "<s>a<s>é!") == [0, 3, 4, 7, 7, 8]
    assert text_offsets(TokenIdText(), [17, 203, 5], "17 203 5") == [0, 2, 6]
