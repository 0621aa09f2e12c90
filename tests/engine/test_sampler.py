"""The token at a position depends on logits, history, seed and position, and on nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.messages import Sampling
from engine.sampler import GREEDY_BELOW, logprobs_of, sample, uniform

LOGITS = torch.tensor(np.random.default_rng(5).normal(0, 2, 4096), dtype=torch.float32)


def draws(sampling: Sampling, count: int = 3000) -> list[int]:
    return [sample(LOGITS, sampling, [], position) for position in range(count)]


def test_uniform_is_a_function_of_seed_and_position() -> None:
    assert uniform(7, 3) == uniform(7, 3)
    assert len({uniform(seed, position) for seed in range(20) for position in range(20)}) == 400
    assert 0.47 < np.mean([uniform(1, position) for position in range(4000)]) < 0.53


def test_uniform_keeps_its_values_across_versions() -> None:
    # A stream that was begun by an older version must continue with the same draws.
    assert uniform(7, 3) == pytest.approx(0.44205212947108785, abs=0)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_temperature_zero_is_the_argmax_and_the_lowest_id_of_equals() -> None:
    assert sample(LOGITS, Sampling(temperature=0), [], 0) == int(LOGITS.argmax())
    assert sample(torch.tensor([1.0, 5.0, 5.0]), Sampling(temperature=0), [], 9) == 1


@pytest.mark.parametrize("temperature", [1e-320, 1e-45, 1e-38, 1e-6])
def test_a_temperature_too_small_to_divide_by_is_greedy(temperature: float) -> None:
    assert set(draws(Sampling(temperature=temperature), 20)) == {int(LOGITS.argmax())}
    assert set(draws(Sampling(temperature=temperature, top_p=0.9), 20)) == {int(LOGITS.argmax())}


def test_the_smallest_temperature_that_counts_is_finite() -> None:
    logits = torch.tensor([3e4, 3e4 - 1, -3e4])
    assert {sample(logits, Sampling(temperature=GREEDY_BELOW, seed=2), [], position) for position in range(20)} == {0}


def test_plain_sampling_follows_the_distribution() -> None:
    expected = torch.softmax(LOGITS, -1)
    top = int(expected.argmax())
    share = draws(Sampling(temperature=1.0, seed=11)).count(top) / 3000
    assert share == pytest.approx(float(expected[top]), abs=0.02)


def test_nothing_is_drawn_but_what_is_allowed() -> None:
    worst = [int(token) for token in LOGITS.topk(3, largest=False).indices]
    assert set(draws(Sampling(seed=1, allowed=worst), 400)) == set(worst)
    assert sample(LOGITS, Sampling(temperature=0, allowed=worst[:1]), [], 0) == worst[0]


def test_a_barred_list_is_never_completed() -> None:
    best, second = (int(token) for token in LOGITS.topk(2).indices)
    greedy = Sampling(temperature=0, barred=[[7, 8, best]])
    assert [sample(LOGITS, greedy, before, 9) for before in ([], [8], [7, 9], [1, 7, 8])] == [best, best, best, second]
    assert sample(LOGITS, Sampling(temperature=0, barred=[[best]]), [], 0) == second
    alone = Sampling(temperature=0, allowed=[best], barred=[[best]])
    assert sample(LOGITS, alone, [], 0) == best, "something has to be drawn"


def test_a_bias_is_added_before_anything_else() -> None:
    second = int(LOGITS.topk(2).indices[1])
    assert sample(LOGITS, Sampling(temperature=0, logit_bias={second: 5.0}), [], 0) == second
    best = int(LOGITS.argmax())
    assert best not in draws(Sampling(seed=1, logit_bias={best: -100.0}), 400)


def test_repetition_is_penalised_in_the_prompt_and_in_the_answer() -> None:
    logits = torch.tensor([3.0, 2.0, -1.0, -1.5])
    greedy = Sampling(temperature=0, repetition_penalty=2.0)
    assert sample(logits, greedy, [], 0) == 0
    assert sample(logits, greedy, [], 1, prompt=[0]) == 1, "3 / 2 is less than 2"
    assert sample(logits, greedy, [0, 0], 2, prompt=[1]) == 0, "both are penalised, once"
    assert sample(logits[2:], greedy, [0], 1) == 1, "-1 * 2 is less than -1.5"
    assert torch.equal(logits, torch.tensor([3.0, 2.0, -1.0, -1.5]))


def test_no_stop_token_is_drawn_before_there_are_enough_tokens() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    greedy = Sampling(temperature=0, min_tokens=2)
    assert [sample(logits, greedy, [1] * n, n, stop_tokens=[0, 7]) for n in range(4)] == [1, 1, 0, 0]
    only_the_end = torch.tensor([True, False, False])
    assert sample(logits, greedy, [], 0, only_the_end, stop_tokens=[0]) == 0, "the grammar lets nothing else through"


def test_top_k_keeps_the_k_likeliest() -> None:
    allowed = set(LOGITS.topk(5).indices.tolist())
    assert set(draws(Sampling(top_k=5, seed=1), 400)) == allowed


def test_top_k_of_one_is_greedy() -> None:
    assert set(draws(Sampling(top_k=1, temperature=2.0, seed=1), 20)) == {int(LOGITS.argmax())}


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.97])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p: float) -> None:
    probabilities, ids = torch.softmax(LOGITS, -1).sort(descending=True)
    count = int((probabilities.cumsum(-1) < top_p).sum()) + 1
    assert set(draws(Sampling(top_p=top_p, seed=2), 500)) <= set(ids[:count].tolist())


def test_top_p_needs_the_whole_vocabulary_when_the_distribution_is_flat() -> None:
    flat = torch.zeros(5000)
    drawn = {sample(flat, Sampling(top_p=0.9, seed=3), [], position) for position in range(300)}
    assert max(drawn) > 1024


def test_min_p_cuts_below_a_share_of_the_likeliest() -> None:
    probabilities = torch.softmax(LOGITS, -1)
    allowed = set((probabilities >= 0.2 * probabilities.max()).nonzero().flatten().tolist())
    assert set(draws(Sampling(min_p=0.2, seed=4), 500)) <= allowed


def test_penalties_count_tokens_of_the_answer() -> None:
    logits = torch.tensor([1.0, 1.5, 0.0])
    assert sample(logits, Sampling(temperature=0, presence_penalty=1.0), [1], 0) == 0
    assert sample(logits, Sampling(temperature=0, frequency_penalty=0.2), [1], 0) == 1
    assert sample(logits, Sampling(temperature=0, frequency_penalty=0.2), [1, 1, 1], 0) == 0


def test_logprobs_are_the_models_own() -> None:
    values = logprobs_of(LOGITS, 17, 3)
    expected = torch.log_softmax(LOGITS, -1)
    assert values.chosen == pytest.approx(float(expected[17]))
    assert [token for token, _ in values.top] == expected.topk(3).indices.tolist()
    assert logprobs_of(LOGITS, 17, 0).top == []
