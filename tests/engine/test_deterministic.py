"""A deterministic engine over the real tiny model: the same bits alone, in company, from a cache, and after a death."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine import messages as m
from engine.errors import UnsupportedModel
from engine.exactness import difference, make_exact
from tests.engine.driver import EngineDriver, random_tokens, submit

Start = Callable[..., EngineDriver]
# Log-probabilities travel as floats: equal ones mean equal logits, not only equal tokens.
SAMPLED = m.Sampling(temperature=0.8, seed=99, logprobs=5)


@pytest.fixture
def exact(start_engine: Start) -> Start:
    return lambda name="e0", **options: start_engine(name, deterministic=True, **options)


def answer(engine: EngineDriver, stream: str) -> list[tuple[int, m.TokenLogprobs | None]]:
    return [(output.token, output.logprobs) for output in engine.outputs(stream)]


def alone(exact: Start, prompt: list[int], count: int) -> list[tuple[int, m.TokenLogprobs | None]]:
    """What an engine with nothing stored and nothing else to do makes."""
    engine = exact("alone")
    engine.handle(submit("alone", prompt, count, sampling=SAMPLED, namespace="alone"))
    engine.run()
    made = answer(engine, "alone")
    engine.close()
    return made


@pytest.mark.process
def test_company_changes_no_bit(exact: Start) -> None:
    prompts = [random_tokens(seed, count) for seed, count in ((1, 300), (2, 17), (3, 600), (4, 45))]
    engine = exact()
    for index, prompt in enumerate(prompts):
        engine.handle(submit(f"s{index}", prompt, 20, sampling=SAMPLED))
        for _ in range(3):
            engine.step()
    engine.run()
    for index, prompt in enumerate(prompts):
        assert answer(engine, f"s{index}") == alone(exact, prompt, 20), f"stream {index}"


@pytest.mark.process
def test_a_turn_on_cached_state_equals_a_cold_one(exact: Start, keeper) -> None:
    """Also where an answer's rows, once decoded, are a prompt's rows now, and where a prompt parts in the middle of a chunk."""
    prompt = random_tokens(5, 330)
    engine = exact()
    engine.handle(submit("first", prompt, 40, sampling=SAMPLED, session="chat"))
    engine.run()
    turn = prompt + engine.tokens("first") + random_tokens(6, 30)
    parted = prompt[:270] + random_tokens(7, 50)
    for name, tokens in (("turn", turn), ("parted", parted)):
        engine.handle(submit(name, tokens, 16, sampling=SAMPLED))
        engine.run()
        assert engine.started(name).reused
        assert answer(engine, name) == alone(exact, tokens, 16), name
    keeper()
    other = exact("other")
    other.handle(submit("elsewhere", turn, 16, sampling=SAMPLED))
    other.run()
    assert other.started("elsewhere").verdict == "restored"
    assert answer(other, "elsewhere") == answer(engine, "turn")


@pytest.mark.process
def test_a_stream_whose_state_is_lost_is_computed_again_to_the_bit(exact: Start) -> None:
    prompt = random_tokens(8, 280)
    whole = alone(exact, prompt, 20)
    serving, spare = exact("serving"), exact("spare")
    serving.handle(submit("s", prompt, 20, sampling=SAMPLED, capture=False))
    serving.handle(submit("beside", random_tokens(9, 100), 60))
    serving.run_until_token("s", 9)
    serving.close()
    known = prompt + serving.tokens("s")
    spare.handle(submit("beside too", random_tokens(10, 100), 60))
    spare.handle(
        submit("s", known, 20, epoch=2, prompt_count=len(prompt), sampling=SAMPLED, capture=False, prefill_start=0)
    )
    spare.run()
    assert answer(serving, "s") + answer(spare, "s") == whole


@pytest.mark.process
def test_state_of_both_modes_is_never_mixed(exact: Start, start_engine: Start) -> None:
    assert exact("a").engine.root != start_engine("b").engine.root


@pytest.mark.process
def test_what_depends_on_the_step_is_found_and_computed_token_by_token(exact: Start) -> None:
    """Attention that is cut as it comes is not exact here; a pass for each token is."""
    engine = exact().engine
    assert engine.cache.exact == "tiles"
    engine.cache.exact = ""
    assert "how a prompt is cut" in difference(engine.model, engine.arena, engine.cache, engine.prefill_chunk)
    engine.cache.exact = "tokens"
    make_exact(engine.model, engine.arena, engine.cache, engine.prefill_chunk)


@pytest.mark.process
def test_an_engine_that_cannot_keep_it_is_refused(exact: Start) -> None:
    """A model that adds noise of its own to each pass."""
    engine = exact().engine
    noise = engine.model.module.model.norm.register_forward_hook(
        lambda module, inputs, output: output + 1e-4 * torch.rand_like(output)
    )
    try:
        with pytest.raises(UnsupportedModel, match="deterministic can't be kept"):
            make_exact(engine.model, engine.arena, engine.cache, engine.prefill_chunk)
    finally:
        noise.remove()


@pytest.mark.process
def test_tiles_see_what_the_plain_attention_sees(exact: Start, start_engine: Start) -> None:
    prompt = random_tokens(11, 500)
    logits = []
    for engine in (exact("tiles").engine, start_engine("plain").engine):
        engine.cache.begin([engine.arena.slots[0]], [0], len(prompt))
        made = engine.model.forward([prompt], [0], engine.cache, logits=True)
        assert made is not None
        logits.append(made)
    assert torch.allclose(*logits, atol=1e-3)
