"""Real processes with one tiny model of each kind: killed at every token, everything killed, branches, many turns.

Each answer is compared with the same request at a server that nobody touches.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.driver import System
from tests.engine.driver import EngineDriver, submit
from tests.engine.kinds import SAMPLE
from tests.system import harness as h
from tests.system.conftest import running, settled_or_new
from tests.system.store_count import drained
from tiers.paths import Paths

ENGINE = {"prefill_chunk": 64, "point_answer_tokens": 8, "context_tokens": 2048}
KINDS = list(SAMPLE)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, System]]:
    """Two engines with the tiny model of one kind."""
    assert request.config.cache is not None
    model = h.build_kind(SAMPLE[request.param], request.config.cache.mkdir("concordia-kinds"))
    for system in running(model, tmp_path_factory.mktemp(request.param), 2, **ENGINE):
        yield request.param, system


@pytest.fixture
def kind(served: tuple[str, System]) -> str:
    return served[0]


@pytest.fixture
def system(served: tuple[str, System]) -> System:
    return settled_or_new(served[1])


each_kind = pytest.mark.parametrize("served", KINDS, indirect=True)
# A fact of four tokens, how deep in the prompt it stands, and how much of it the question repeats.
FACT_DEPTHS = (0.05, 0.5, 0.95)
FACT_TOKENS, ASKED_TOKENS = 4, 3


def prompt_of(seed: int, count: int) -> list[int]:
    return h.random_tokens(seed, count, low=3, high=512)


class Cold:
    """An engine in this process, of the same model, that reuses nothing and computes a prompt whole: what a cold engine says."""

    def __init__(self, model: Path, directory: Path) -> None:
        paths, options = Paths.at(directory / "data", directory / "lanes"), {**ENGINE, "prefill_chunk": 512}
        self.driver = EngineDriver.start(model, paths, **options)
        self.count = 0

    def __call__(self, tokens: list[int], count: int) -> list[int]:
        self.count += 1
        name = f"cold{self.count}"
        self.driver.handle(submit(name, tokens, count, namespace=name, capture=False))
        self.driver.run()
        return self.driver.tokens(name)


@pytest.fixture
def cold(served: tuple[str, System], tmp_path: Path) -> Iterator[Cold]:
    made = Cold(Path(served[1].model), tmp_path)
    yield made
    made.driver.close()


def ask(system: System, tokens: list[int], session: str, count: int = 8) -> tuple[h.Answer, list[int]]:
    """An answer in a session of its own, and its token ids; the session is parked afterwards."""
    headers = {"X-Session-Id": session}
    answer = system.stream(h.COMPLETIONS, h.completion(system, tokens, tokens=count), headers=headers)
    h.assert_whole(answer)
    ids = system.get(f"/v1/sessions/{session}?tokens=1")["token_ids"]
    assert ids[: len(tokens)] == tokens
    h.settled(system)
    status, _, body = system.call("POST", f"/v1/sessions/{session}/park")
    assert status == 200, body
    return answer, ids[len(tokens) :]


def sessions_show(system: System, session: str) -> dict[str, Any]:
    """`concordia sessions show`."""
    concordia = str(Path(sys.executable).with_name("concordia"))
    url, data = f"http://127.0.0.1:{system.port}", str(system.paths.data_dir)
    command = [concordia, "sessions", "show", session, "--json", "--url", url, "--data-dir", data]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@each_kind
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tokens", [12, pytest.param(48, marks=pytest.mark.soak)])
def test_kind_killed_at_every_token(system: System, kind: str, tokens: int) -> None:
    """Case 5. Every kind, text of random weights; one chunk and a bit of prompt, one point within the answer or several."""
    body = h.completion(system, prompt_of(71, 90), h.SAMPLED, tokens=tokens)
    want = system.stream(h.COMPLETIONS, body)
    h.assert_whole(want)
    h.killed_at_every_token(system, h.COMPLETIONS, body, want, kind)


@each_kind
@pytest.mark.timeout(200)
def test_kind_turns_and_branches_after_everything_was_killed(system: System, kind: str, cold: Cold) -> None:
    """Case 1: each against a cold engine's answer, each with its verdict. Every session is off the device when it is asked for."""
    prompt, facts = planted(prompt_of(72, 900))
    _, said = ask(system, prompt, "base")
    told = prompt + said
    branches = {
        "append": (told + prompt_of(73, 9), 0),
        "one": (told[:-1] + prompt_of(74, 5), 1),
        "twelve": (told[:-12] + prompt_of(75, 20), 12),
        "back": (told[:200] + prompt_of(76, 30), 708),
        "again": (prompt, 9),
        **{f"fact-{depth}": (told + fact[:ASKED_TOKENS], 0) for depth, fact in facts.items()},
    }
    system.kill_all()
    h.settled(system.start())
    for name, (tokens, back) in branches.items():
        got, ids = ask(system, tokens, name)
        assert ids == cold(tokens, 8), name
        said_of, matched = got.concordia, len(told) - back
        reused = h.cached(got)
        if kind in ("window", "latent"):
            assert (reused, said_of["verdict"], said_of["reason"]) == (matched, "restored", ""), (name, said_of)
        elif name == "append" or name.startswith("fact"):
            assert (reused, said_of["verdict"]) == (matched, "restored"), said_of
        else:
            assert matched - 70 <= reused <= matched, (name, said_of)
            assert reused == matched or "rollback point" in said_of["reason"], (name, said_of)
    drained(system)
    shown = sessions_show(system, "append")
    assert (shown["rollback_point_bytes"] > 0) == (kind not in ("window", "latent")), shown


def planted(prompt: list[int]) -> tuple[list[int], dict[float, list[int]]]:
    """A prompt with a fact at each depth, and the facts."""
    facts = {depth: prompt_of(760 + index, FACT_TOKENS) for index, depth in enumerate(FACT_DEPTHS)}
    for depth, fact in facts.items():
        at = int(depth * len(prompt))
        prompt[at : at + FACT_TOKENS] = fact
    return prompt, facts


@pytest.mark.parametrize("served", ["window", "linear"], indirect=True)
@pytest.mark.timeout(280)
def test_kind_a_hundred_turns_of_park_and_resume_with_branches(system: System, kind: str, cold: Cold) -> None:
    """Case 3. Every turn goes on from the tip or from an earlier turn; halfway everything is killed."""
    draw = random.Random(77)
    told = [prompt_of(78, 120)]
    for turn in range(100):
        base = told[-1] if draw.random() < 0.6 else draw.choice(told[-12:])
        base = base[: len(base) - draw.choice((0, 0, 1, 7, 40))]
        if len(base) > 360:
            base = base[: draw.randrange(100, 250)]
        tokens = base + prompt_of(1000 + turn, draw.randrange(3, 20))
        got, ids = ask(system, tokens, f"turn{turn}", 6)
        assert ids == cold(tokens, 6), (turn, got.concordia)
        assert h.cached(got) >= len(base) - 140, (turn, len(base), got.concordia)
        told.append(tokens + ids)
        if turn == 49:
            system.kill_all()
            h.settled(system.start())
