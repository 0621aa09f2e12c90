"""Answers under a grammar: valid whatever the model wants, the same after a kill at any token, and no cost to others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher
from tokenizers import Tokenizer
from transformers import AutoConfig

from engine import grammar as grammar_module
from engine import messages as m
from engine.errors import BadRequest
from engine.grammar import Grammars, warm
from engine.model import declared_tokens
from tests.engine.driver import EngineDriver, random_tokens, submit

Start = Callable[..., EngineDriver]
STOP = [2]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "kind": {"enum": ["ship", "tide"]},
    },
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA, defaults={"whitespace_pattern": "[ \n]{1,4}"})  # type: ignore[arg-type]
HOT = m.Sampling(temperature=0.9, seed=77)


def text_of(tiny_dir: Path, tokens: list[int]) -> str:
    return Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).decode(tokens)


def answered(start_engine: Start, name: str, prompt: list[int], sampling: m.Sampling) -> list[int]:
    engine = start_engine(name)
    engine.handle(submit("s", prompt, 200, sampling=sampling, stop_tokens=STOP, grammar=GRAMMAR, namespace=name))
    engine.run_until_done()
    assert engine.outputs("s")[-1].finish == "stop"
    return engine.tokens("s")


@pytest.mark.parametrize("sampling", [m.Sampling(temperature=0), HOT, m.Sampling(temperature=1, top_p=0.7, seed=3)])
def test_a_random_model_gives_what_the_schema_says(start_engine: Start, tiny_dir: Path, sampling: m.Sampling) -> None:
    tokens = answered(start_engine, "e0", random_tokens(60, 40), sampling)
    value = json.loads(text_of(tiny_dir, tokens[:-1]))
    assert set(value) == {"name", "age", "kind"}
    assert value["kind"] in ("ship", "tide") and 0 <= value["age"] <= 120
    assert tokens[-1] in STOP


@pytest.mark.process
def test_killed_at_any_token_the_answer_is_the_same(start_engine: Start) -> None:
    prompt = random_tokens(61, 70)
    whole = answered(start_engine, "reference", prompt, HOT)
    spare = start_engine("spare")
    for killed_at in range(1, len(whole)):
        delivered = whole[:killed_at]
        spare.handle(
            submit(
                f"s{killed_at}", prompt + delivered, 200, epoch=2, prompt_count=len(prompt), prefill_start=0,
                sampling=HOT, stop_tokens=STOP, grammar=GRAMMAR, namespace="reference",
            )
        )  # fmt: skip
        spare.run_until_done()
        assert delivered + spare.tokens(f"s{killed_at}") == whole, f"killed at token {killed_at}"


def test_a_free_row_beside_a_constrained_one_is_left_alone(start_engine: Start) -> None:
    prompt = random_tokens(62, 50)
    alone, beside = start_engine("alone"), start_engine("beside")
    alone.handle(submit("s", prompt, 20, namespace="alone"))
    alone.run()
    beside.handle(
        submit("g", random_tokens(63, 30), 60, stop_tokens=STOP, grammar=GRAMMAR, namespace="beside"),
        submit("s", prompt, 20, namespace="beside"),
    )
    beside.run_until_done()
    assert beside.tokens("s") == alone.tokens("s")


def test_a_grammar_that_does_not_compile_is_refused_and_others_go_on(start_engine: Start) -> None:
    engine = start_engine()
    engine.handle(
        submit("bad", random_tokens(64, 30), 8, stop_tokens=STOP, grammar=LLMatcher.grammar_from_regex("(a")),
        submit("good", random_tokens(65, 30), 8),
    )
    engine.run_until_done()
    refused = next(x for x in engine.sent if isinstance(x, m.Refused))
    assert (refused.stream, refused.code) == ("bad", "bad_grammar")
    assert len(engine.tokens("good")) == 8


def test_a_grammar_is_compiled_once(tiny_dir: Path) -> None:
    grammars = Grammars(tiny_dir, 512, (2,))
    first = grammars.prepare(GRAMMAR, STOP, []).result()
    second = grammars.prepare(GRAMMAR, STOP, []).result()
    assert len(grammars._compiled) == 1
    allowed = first.allowed()
    assert allowed.shape == (512,) and 0 < int(allowed.sum()) < 512
    first.advance([int(np.flatnonzero(allowed.numpy())[0])])
    assert bool((second.allowed() == allowed).all()), "matchers share nothing that moves"
    with pytest.raises(BadRequest):
        grammars.prepare(GRAMMAR, STOP, [5, 5, 5]).result()
    grammars.close()


def test_a_grammar_that_stands_for_too_much_is_refused(tiny_dir: Path) -> None:
    grammars = Grammars(tiny_dir, 512, (2,))
    matcher = grammars.prepare(LLMatcher.grammar_from_regex("(a{1000}){1000}"), STOP, []).result()
    with pytest.raises(BadRequest, match="make it simpler"):
        matcher.advance(np.flatnonzero(matcher.allowed().numpy())[:1].tolist())
    grammars.close()


def test_the_vocabulary_is_read_before_the_engine_serves(tiny_dir: Path, start_engine: Start) -> None:
    grammar_module._vocabularies.clear()
    engine = start_engine().engine
    known = list(grammar_module._vocabularies)
    assert known == [(tiny_dir / "tokenizer.json", engine.model.vocab_count, engine.model.stop_tokens)]
    config = AutoConfig.from_pretrained(tiny_dir, local_files_only=True)
    assert declared_tokens(tiny_dir, config) == known[0][1:], "what the nursery reads is what its engines look for"


def test_a_vocabulary_that_cannot_be_used_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    warm(tmp_path, 512, (2,))
    grammars = Grammars(tmp_path, 512, (2,))
    with pytest.raises(ValueError):
        grammars.prepare(GRAMMAR, STOP, []).result()
    grammars.close()
