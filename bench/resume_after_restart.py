"""What does a session's next turn cost after the whole system was killed and started again?

Question  Time to first token of the session's next turn (`end to end L`), and prompt processing alone (`prompt L`), by length L of
          what the session holds.
Regime    Demo model, one engine; every process gets SIGKILL and the system is started again on the same data directory
          before each measurement; the next turn is the session's token list plus new ones, as token ids, so that lengths are
          exact. Client's clock; prompt processing as the engine reports it (restore not included).
          The turn adds one token: what it costs to have the session back. What a turn adds beyond that is computed by both
          sides, and costs more the longer it is: at 7k also for turns that add OTHER_TURNS tokens (`..., N new`). By arithmetic,
          at equal efficiency, N tokens behind 7,168 of the demo model can be 4,650 / N times less than all of them: 583 for 8.
Baseline  The same request at an engine with an empty store, which computes all of it and has to answer the same, in the same run.
Unit      ms; ratio is recompute / resume. Wanted: at least 150 for `end to end 7k`, at least 700 for `prompt 7k`.
Seed      --seed
"""

from __future__ import annotations

import random
from typing import Any

from bench import report
from bench.driver import System, request, system
from bench.sse import Answer, StreamError
from tiers import keeper_client

LENGTHS = (256, 1024, 4096, 7168)
QUICK_LENGTHS = (7168,)
NEXT_TURN_TOKENS = 1
OTHER_TURNS = (8, 32)  # a few words; a short message within its template
OTHERS_AT = 7168
# Far more than any answer takes on a busy machine.
DEADLINE_S = 900.0
WANTED = {"end to end 7k": ">= 150", "prompt 7k": ">= 700"}


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    repeats = 3 if options.quick else 5
    prompts = {length: report.random_tokens(draw, length) for length in lengths}
    turns = {length: [report.random_tokens(draw, NEXT_TURN_TOKENS) for _ in range(repeats)] for length in lengths}
    others = {count: [report.random_tokens(draw, count) for _ in range(repeats)] for count in OTHER_TURNS}
    rows = report.Report("resume_after_restart", options)
    settings = {"engine": {"threads": options.threads}}
    with system(options.model, name="empty", engines=1, settings=settings) as empty:
        cold = {length: timed(empty, prompts[length] + turns[length][0]) for length in lengths}
    if any(run["cached_tokens"] for run in cold.values()):
        raise StreamError(f"nothing should have been stored: {cold}")
    with system(options.model, name="resume", engines=1, settings=settings) as running:
        ours = {
            length: resumes(running, report.length_name(length), prompts[length], turns[length]) for length in lengths
        }
        long = report.length_name(OTHERS_AT)
        more = {count: resumes(running, f"{long} {count}", prompts[OTHERS_AT], others[count]) for count in OTHER_TURNS}
    for length in lengths:
        if ours[length][0]["text"] != cold[length]["text"]:
            raise StreamError(f"{length}: resumed {ours[length][0]}, computed {cold[length]}")
    rows.details = {"cold": cold, "resumed": ours, "others": more, "next_turn_tokens": NEXT_TURN_TOKENS}
    for length in lengths:
        add(rows, report.length_name(length), "", ours[length], cold[length])
    for count in OTHER_TURNS:
        add(rows, long, f", {count} new", more[count], cold[OTHERS_AT])
    rows.finish()


def add(rows: report.Report, length: str, turn: str, resumed: list[dict[str, Any]], recomputed: dict[str, Any]) -> None:
    """Two rows: until the client has its first token, and the engine's part of computing the prompt."""
    for case, key in (("end to end", "first_token_ms"), ("prompt", "prefill_ms")):
        value, baseline = report.median([run[key] for run in resumed]), recomputed[key]
        note = f"restore {report.median([run['restore_ms'] for run in resumed]):.0f} ms"
        name = f"{case} {length}{turn}"
        rows.add(report.Row(name, value, "ms", baseline, baseline / value, WANTED.get(name, ""), note))


def resumes(
    running: System, case: str, prompt: list[int], turns: list[list[int]], *, compact: bool = False
) -> list[dict[str, Any]]:
    """Store the session once, then restart everything and ask for a next turn, again and again.

    compact  before each restart, as the keeper does with sessions that nobody used for a while
    """
    session = "resume-" + case.replace(" ", "-")
    ask(running, prompt, session)
    measured = []
    for turn in turns:
        keeper_client.drain(running.paths.keeper_socket, sync=True)
        if compact:
            keeper_client.compact(running.paths.keeper_socket, timeout_s=DEADLINE_S)
        running.kill_all()
        running.start()
        run = timed(running, prompt + turn, session)
        if run["cached_tokens"] < len(prompt) - 1:
            raise StreamError(f"{case}: {run['cached_tokens']} of {len(prompt)} tokens were restored")
        measured.append(run)
        report.say(f"  {case}: {run}")
    return measured


def timed(running: System, prompt: list[int], session: str = "", **more: Any) -> dict[str, Any]:
    """One request: time to first token by the client's clock, the engine's own times, what was reused, the text."""
    answer = ask(running, prompt, session, **more)
    timing: dict[str, Any] = answer.concordia["timing"]
    return {
        "first_token_ms": 1000 * answer.first_token_s,
        "wait_ms": float(timing["wait_ms"]),
        "restore_ms": float(timing["restore_ms"]),
        "prefill_ms": float(timing["prefill_ms"]),
        "cached_tokens": float((answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
        "text": answer.text,
    }


def ask(running: System, prompt: list[int], session: str, **more: Any) -> Answer:
    headers = {"X-Session-Id": session} if session else {}
    answer = running.stream("/v1/completions", request(prompt, 2, **more), headers=headers, timeout_s=DEADLINE_S)
    if not answer.done or answer.error:
        raise StreamError(answer.describe())
    return answer


if __name__ == "__main__":
    main()
