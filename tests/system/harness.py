"""What the system tests share: which models, which requests, and what "the same answer" means.

Processes, HTTP and SSE are driven by `bench/driver.py`. Tests compare an interrupted stream with an uninterrupted run
of the same request at a server that nobody touches; both run alone on their engine, on one thread, so that bits may be
compared (a row in a batch isn't bit-equal to the row alone).
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from bench.driver import DriverError, EngineView, NotAnswered, StreamOver, System, wait_for
from bench.sse import Answer, Watcher

T = TypeVar("T")
ANSWER_TOKENS = 48
TRIES = 8  # at an answer that may be over before what is to happen amid it
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "seed": 20261129}
MODES: dict[str, dict[str, Any]] = {"greedy": GREEDY, "sampled": SAMPLED}
ROOT = Path(__file__).parents[2]
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
SECRET = "a secret of"  # how every key of a test begins
SMALL_LANES = {"lane_bytes": 16 << 20, "lane_record_count": 1 << 14}
LANES = {"lane_bytes": 64 << 20, "lane_record_count": 1 << 14}  # for models whose tokens are tens of kilobytes
# Tiny models compute as fast as a busy machine copies: what is stored is always put back. Memory is touched when it is needed.
ONE_THREAD = {"threads": 1, "restore": "always", "prefault_tokens": 0}


# ---------------------------------------------------------------- models


def build_tiny_model(cache: Path) -> Path:
    """The tiny seeded model's directory, made once for this version of `tiny_model.py`."""
    from tests.system import tiny_model

    return _built(cache, "tiny", [Path(tiny_model.__file__)], tiny_model.write)


def build_kind(name: str, cache: Path) -> Path:
    """Directory of the tiny model of one architecture (tests/engine/kinds.py) with a tokenizer, made once for this version."""
    from tests.engine import kinds
    from tests.system import tiny_model

    def write(directory: Path) -> None:
        tiny_model.write_tokenizer(kinds.write_model(name, directory))

    return _built(cache, name, [Path(kinds.__file__), Path(tiny_model.__file__)], write)


def _built(cache: Path, name: str, sources: list[Path], write: Callable[[Path], None]) -> Path:
    """What `write` makes, which these sources define; a directory is whole or not there, whoever asks meanwhile.

    In this process, which has torch as a rule: a process of its own would take ten times as long, most of it for imports.
    """
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:12]
    target = cache / f"{name}-{digest}"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=cache) as directory:
            made = Path(directory) / "made"
            write(made)
            with contextlib.suppress(OSError):
                made.rename(target)  # somebody else was first: theirs is the same
    assert (target / "tokenizer.json").exists(), target
    return target


def pull_demo_model() -> str:
    """Have the demo model in the model cache and return the name to serve it by; DEMO_MODEL names another directory."""
    other = os.environ.get("DEMO_MODEL")
    if other:
        return other
    command = [str(Path(sys.executable).with_name("concordia")), "pull", "smollm2"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"concordia pull smollm2 failed:\n{done.stdout}\n{done.stderr}"
    return "smollm2"


# ---------------------------------------------------------------- requests


def chat(
    system: System, content: str, mode: dict[str, Any] = GREEDY, *, tokens: int = ANSWER_TOKENS, **more: Any
) -> dict:
    """Body of a chat request with one user message."""
    return chat_of(system, [{"role": "user", "content": content}], mode, tokens=tokens, **more)


def chat_of(
    system: System,
    messages: list[dict[str, str]],
    mode: dict[str, Any] = GREEDY,
    *,
    tokens: int = ANSWER_TOKENS,
    **more: Any,
) -> dict:
    """Body of a chat request."""
    return {"model": system.model_name(), "messages": messages, "max_tokens": tokens, **mode, **more}


def completion(
    system: System, prompt: Any, mode: dict[str, Any] = GREEDY, *, tokens: int = ANSWER_TOKENS, **more: Any
) -> dict:
    """Body of a completion request; the prompt is text or a list of token ids."""
    return {"model": system.model_name(), "prompt": prompt, "max_tokens": tokens, **mode, **more}


def prompts(seed: int, count: int) -> list[str]:
    """Seeded short user messages, no two alike, that the demo model answers at length."""
    draw = random.Random(seed)
    things = [
        "a lighthouse",
        "the tide",
        "an old clock",
        "a river",
        "bread",
        "the night sky",
        "a train",
        "salt",
        "a violin",
    ]
    forms = ["Write a long story about {}.", "Explain {} to a child in many words.", "Describe {} in great detail."]
    made = [f"{draw.choice(forms).format(draw.choice(things))} Chapter {draw.randrange(10_000)}." for _ in range(count)]
    assert len(set(made)) == count, "draw another seed"
    return made


def story(
    system: System, seed: int, mode: dict[str, Any] = GREEDY, *, tokens: int = ANSWER_TOKENS, **more: Any
) -> dict:
    """Body of a completion request whose very first token no other seed has.

    So nothing that another test left on a device is reused, and all of the prompt is computed in the same chunk wherever
    it is sent: rows of a prefix that were computed in a chunk of another length differ in their last bits, and a sampled
    token may fall on such a boundary. Chat requests share at least the template's first tokens.
    """
    opening = OPENINGS[seed % len(OPENINGS)]
    thing = random.Random(seed).choice(["a lighthouse", "the tide", "an old clock", "a river", "a train", "a violin"])
    text = f"{opening}, chapter {seed}. A long story about {thing}.\n\nOnce upon a time"
    return completion(system, text, mode, tokens=tokens, **more)


def random_tokens(seed: int, count: int, *, low: int = 300, high: int = 40_000) -> list[int]:
    """Seeded token ids that are no special tokens of the demo model."""
    draw = random.Random(seed)
    return [draw.randrange(low, high) for _ in range(count)]


OPENINGS = [
    *("Apple", "Bridge", "Candle", "Desert", "Engine", "Forest", "Garden", "Harbor", "Island", "Jungle", "Kitchen"),
    *("Lantern", "Mountain", "Night", "Ocean", "Palace", "Queen", "River", "Silver", "Temple", "Valley", "Winter"),
    *("Yellow", "Zero", "Bread", "Clock", "Dragon", "Eagle", "Flower"),
]
NOUNS = [
    "time",
    "year",
    "day",
    "man",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "group",
    "country",
]
VERBS = [
    "sees",
    "finds",
    "gives",
    "tells",
    "asks",
    "keeps",
    "holds",
    "turns",
    "starts",
    "shows",
    "hears",
    "moves",
    "likes",
]


def words(seed: int, count: int) -> str:
    """At least `count` tokens of seeded plain English, in sentences of seven."""
    draw = random.Random(seed)
    sentences = -(-count // 6)
    return " ".join(
        f"The {draw.choice(NOUNS)} {draw.choice(VERBS)} the {draw.choice(NOUNS)} again." for _ in range(sentences)
    )


def to_its_end(system: System, path: str, body: dict[str, Any], watch: Watcher | None = None) -> Answer:
    """An answer as a client gets it that comes back whatever is killed: by its cursor, or with the same request if that was never answered.

    path, body  of a request that is stored
    watch       runs after each event of the first connection that is answered
    """
    answer = Answer()

    def attempt() -> bool:
        if not answer.stream_id:
            with contextlib.suppress(NotAnswered):
                system.stream(path, body, watch=watch, answer=answer)
        else:
            with contextlib.suppress(DriverError):  # a gateway that isn't there yet, or not yet whole
                system.resume(answer)
        return answer.done

    wait_for("the end of an answer", attempt, 120.0, every_s=0.05)
    return answer


# ---------------------------------------------------------------- acting in mid-answer


def after(token_count: int, act: Callable[[Answer], Any]) -> Callable[[Answer], None]:
    """A watcher that acts once, when that many tokens have come (0: with the first event of any kind)."""
    done = False

    def watch(answer: Answer) -> None:
        nonlocal done
        if not done and len(answer.tokens) >= token_count:
            done = True
            act(answer)

    return watch


def once(act: Callable[[Answer], Any]) -> Callable[[Answer], None]:
    """`act` for whichever of several answers comes first, each on a thread of its own."""
    first = threading.Lock()

    def watch(answer: Answer) -> None:
        if first.acquire(blocking=False):
            act(answer)

    return watch


def killer(system: System, number: signal.Signals = signal.SIGKILL) -> Callable[[Answer], None]:
    """Acts by sending a signal to the engine that serves the stream now, if one still does."""

    def act(answer: Answer) -> None:
        with contextlib.suppress(StreamOver):
            kill_serving(system, answer.stream_id, number)

    return act


def kill_serving(system: System, stream_id: str, number: signal.Signals = signal.SIGKILL, pid: int = 0) -> int:
    """Send a signal to the engine that serves the stream, `pid` if it still does; return the pid that got it.

    An engine that was replaced meanwhile is looked up again: the one to be hit is the one that serves now. Raises StreamOver.
    """
    for _ in range(100):
        with contextlib.suppress(ProcessLookupError):
            pid = pid or system.serving_engine(stream_id).pid
            os.kill(pid, number)
            return pid
        pid = 0
    raise DriverError(f"no engine that serves {stream_id} could be hit")


def kill_at(system: System, token_count: int) -> Callable[[Answer], None]:
    """A watcher that kills the serving engine when that many tokens have come, or nobody if the answer is over by then.

    The engine is looked up at the first event, so that nothing stands between a later token and its kill.
    """
    found: list[EngineView] = []

    def watch(answer: Answer) -> None:
        with contextlib.suppress(StreamOver):
            if not found:
                found.append(system.serving_engine(answer.stream_id))
            act(answer)

    act = after(token_count, lambda answer: kill_serving(system, answer.stream_id, pid=found[0].pid))
    return watch


def until(hit: Callable[[T], Any], system: System, run: Callable[[], T]) -> T:
    """The first `run` of which `hit` holds. Where others take the cores, an answer may be over before what was to come amid it."""
    for _ in range(TRIES):
        settled(system)
        with contextlib.suppress(StreamOver):
            result = run()
            if hit(result):
                return result
    raise AssertionError(f"{TRIES} times it was over before anything happened to it")


def killed_at_every_token(system: System, path: str, body: dict[str, Any], want: Answer, label: str) -> None:
    """The same answer, with its engine killed after each of its tokens; most kills must have hit the answer."""
    last = len(want.tokens) - 3  # later than that, the rest is on its way by the time of the kill
    recovered = 0
    for position in range(len(want.tokens)):
        for _ in range(1 if position > last else TRIES):
            settled(system)
            got = system.stream(path, body, watch=kill_at(system, position))
            assert_same(got, want, f"{label}, killed after {position} tokens")
            assert not recoveries(got) or got.comments, "a recovery is marked by an SSE comment"
            if recoveries(got):
                recovered += 1
                break
    print(f"{label}: {recovered} of {len(want.tokens)} kills came before the answer's last token")
    assert recovered >= len(want.tokens) // 2, "most kills must have hit the answer"


# ---------------------------------------------------------------- what must hold


def assert_whole(answer: Answer) -> None:
    """It ended as a stream should: ids without gap or repeat, one finish, [DONE] last."""
    assert answer.done, answer.describe()
    assert not answer.error, answer.describe()
    first = answer.ids[0]
    assert answer.ids == list(range(first, first + len(answer.ids))), f"ids with a gap or repeat: {answer.ids}"
    reasons = [c["finish_reason"] for e in answer.events for c in e.body.get("choices") or [] if c.get("finish_reason")]
    assert len(reasons) == 1, f"finish reasons {reasons}: {answer.describe()}"


def counts(answer: Answer) -> tuple[int, int, int]:
    usage = answer.usage
    return usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]


def assert_same(got: Answer, want: Answer, label: str) -> None:
    """Byte-for-byte the same answer, with the same end and the same counts."""
    assert_whole(want)
    assert_whole(got)
    assert got.text.encode() == want.text.encode(), f"{label}: text differs\n got {got.text!r}\nwant {want.text!r}"
    assert got.finish_reason == want.finish_reason, f"{label}: {got.finish_reason} instead of {want.finish_reason}"
    assert counts(got) == counts(want), f"{label}: usage {got.usage} instead of {want.usage}"
    assert len(got.events) == len(want.events), f"{label}: {len(got.events)} events instead of {len(want.events)}"


def recoveries(answer: Answer) -> list[dict[str, Any]]:
    return list(answer.concordia.get("recoveries") or [])


def cached(answer: Answer) -> int:
    return int((answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def settled(system: System, timeout_s: float = 60.0) -> System:
    """Every engine is ready and none works on anything: the next request runs alone."""
    system.wait_ready(timeout_s=timeout_s, every_s=0.1)

    def idle() -> bool:
        engines = system.engines()
        return bool(engines) and not any(engine.busy for engine in engines)

    system.wait("idle engines", idle, timeout_s)
    return system
