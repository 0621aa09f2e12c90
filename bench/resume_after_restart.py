"""What does a session's next turn cost after the whole system was killed and started again?

Question  Time to first token of the next turn (`end to end L`), and prompt processing alone (`prompt L`), by length L of
          what the session holds.
Regime    Demo model, one engine; every process gets SIGKILL and the system is started again on the same data directory
          before each measurement; the next turn is the session's token list plus NEXT_TURN_TOKENS new ones, as token ids,
          so that lengths are exact. Client's clock; prompt processing as the engine reports it (restore not included).
          What a turn costs depends on how much it adds: cases `prompt 7k, N new` say it of other turns (OTHER_TURNS).
Baseline  The same request at an engine with an empty store, which computes all of it, in the same run.
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
NEXT_TURN_TOKENS = 8
# A question asked again computes its last token only; 32 are a short message within its template.
OTHER_TURNS = (1, 32)
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
    with system(options.model, name="resume", engines=1, settings=settings) as running:
        ours = {
            length: resumes(running, report.length_name(length), prompts[length], turns[length]) for length in lengths
        }
        long = report.length_name(OTHERS_AT)
        more = {count: resumes(running, f"{long} {count}", prompts[OTHERS_AT], others[count]) for count in OTHER_TURNS}
    rows.details = {"cold": cold, "resumed": ours, "others": more, "next_turn_tokens": NEXT_TURN_TOKENS}
    for length in lengths:
        for case, key in (("end to end", "first_token_ms"), ("prompt", "prefill_ms")):
            name = f"{case} {report.length_name(length)}"
            value, baseline = report.median([run[key] for run in ours[length]]), cold[length][key]
            note = f"restore {report.median([run['restore_ms'] for run in ours[length]]):.0f} ms"
            rows.add(report.Row(name, value, "ms", baseline, baseline / value, WANTED.get(name, ""), note))
    for count in OTHER_TURNS:
        value, baseline = report.median([run["prefill_ms"] for run in more[count]]), cold[OTHERS_AT]["prefill_ms"]
        rows.add(report.Row(f"prompt {long}, {count} new", value, "ms", baseline, baseline / value))
    rows.finish()


def resumes(
    running: System, case: str, prompt: list[int], turns: list[list[int]], *, compact: bool = False
) -> list[dict[str, float]]:
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


def timed(running: System, prompt: list[int], session: str = "", **more: Any) -> dict[str, float]:
    """One request: time to first token by the client's clock, the engine's own times, and what was reused."""
    answer = ask(running, prompt, session, **more)
    timing: dict[str, Any] = answer.concordia["timing"]
    return {
        "first_token_ms": 1000 * answer.first_token_s,
        "wait_ms": float(timing["wait_ms"]),
        "restore_ms": float(timing["restore_ms"]),
        "prefill_ms": float(timing["prefill_ms"]),
        "cached_tokens": float((answer.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)),
    }


def ask(running: System, prompt: list[int], session: str, **more: Any) -> Answer:
    headers = {"X-Session-Id": session} if session else {}
    answer = running.stream("/v1/completions", request(prompt, 2, **more), headers=headers, timeout_s=DEADLINE_S)
    if not answer.done or answer.error:
        raise StreamError(answer.describe())
    return answer


if __name__ == "__main__":
    main()
