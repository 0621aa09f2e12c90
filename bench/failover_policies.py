"""What does a recovery cost under each failover policy, and does it grow with the context?

Question  SIGKILL of the serving engine: the client's wait for its next token under `cold`, `warm` and `hot`, by length of context.
Regime    Demo model, one stream, greedy, prompt of seeded random token ids; two engines (cold: one). The kill comes right after the
          ninth token, under `hot` after the first of the later ones for which the standby has caught up. Median of several kills; every
          process is real. The policies are served one after the other from one data directory, so that a prompt is computed once and
          restored from then on.
Baseline  Of each policy and length: `cold` at that length, in the same run. Of `hot 7k / 256`: hot at the shortest length. Of
          `hot ... beyond a token`: the wait for an ordinary token.
Unit      ms; ratio is cold / ours, except `hot 7k / 256` (longest / shortest). Wanted: at most 1.2 there, and 150 ms beyond a token.
          Every wait for a token, after a kill or not, has the token's own step in it, and on a CPU that takes twice as long at 7k as
          at 256: without any failure the ratio is above 2. `hot 7k / 256` asks whether recovery grows, so the gap at 7k is taken less
          what an ordinary token takes longer there than at 256. `..., with the token's growth` is the ratio of the bare gaps.
Seed      --seed
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from bench import moving, report, scratch
from bench.driver import System, request
from bench.recovery_gap import PARTS

LENGTHS = (256, 1024, 4096, 7168)
QUICK_LENGTHS = (256, 7168)
POLICIES = ("cold", "warm", "hot")
KILL_AFTER_TOKENS = 8
ANSWER_TOKENS = 24


def main() -> None:
    options = report.arguments(__doc__)
    draw = random.Random(options.seed)
    lengths = QUICK_LENGTHS if options.quick else LENGTHS
    rows = report.Report("failover_policies", options)
    prompts = {length: report.random_tokens(draw, length) for length in lengths}
    with scratch.directory("policies") as directory:
        measured = {policy: measure(options, policy, prompts, directory / "data") for policy in POLICIES}
    rows.details = measured
    gap = {(p, n): report.median([kill["gap_ms"] for kill in measured[p][n]]) for p in POLICIES for n in lengths}
    for policy in POLICIES:
        for length in lengths:
            kills = measured[policy][length]
            parts = {part: report.median([kill[part] for kill in kills]) for part in PARTS}
            note = ", ".join(f"{name.removesuffix('_ms')} {value:.0f}" for name, value in parts.items())
            ours, cold = gap[policy, length], gap["cold", length]
            rows.add(report.Row(f"{policy} {report.length_name(length)}", ours, "ms", cold, cold / ours, "", note))
    add_hot(rows, measured["hot"], gap, lengths)
    rows.finish()


def add_hot(rows: report.Report, hot: Any, gap: dict[tuple[str, int], float], lengths: tuple[int, ...]) -> None:
    short, long = lengths[0], lengths[-1]
    token = {length: report.median([kill["token_ms"] for kill in hot[length]]) for length in lengths}
    bare = gap["hot", long]
    recovery = bare - (token[long] - token[short])
    name = f"hot {report.length_name(long)} / {report.length_name(short)}"
    for case, value, wanted in ((name, recovery, "<= 1.2"), (f"{name}, with the token's growth", bare, "")):
        rows.add(report.Row(case, value, "ms", gap["hot", short], value / gap["hot", short], wanted))
    for length in lengths:
        case = f"hot {report.length_name(length)} beyond a token"
        beyond = max(0.0, gap["hot", length] - token[length])
        rows.add(report.Row(case, beyond, "ms", token[length], beyond / token[length], "value <= 150"))


def measure(
    options: Any, policy: str, prompts: dict[int, list[int]], data_dir: Path
) -> dict[int, list[dict[str, float]]]:
    """Per length: gap, parts and the time of an ordinary token, of each kill."""
    host = {"restart_limit_ms": 500, "nursery": policy != "cold"}
    spares = {"failover": policy, "spares": 0 if policy == "cold" else 1}
    settings = {"engine": {"threads": options.threads}, "host": host, "gateway": spares}
    engines = 1 if policy == "cold" else 2
    kills = {"cold": 1 if options.quick else 3}.get(policy, 5 if options.quick else 9)
    measured = {}
    running = System(options.model, data_dir, engines=engines, settings=settings)
    try:
        running.start()
        for length, prompt in prompts.items():
            body = request(prompt, ANSWER_TOKENS)
            running.stream("/v1/completions", body, timeout_s=300.0)  # stored now, if it was not; what follows finds it
            measured[length] = [one_kill(running, body, policy) for _ in range(kills)]
            report.say(f"  {policy} {length}: {[round(kill['gap_ms']) for kill in measured[length]]} ms")
        running.stop()
    finally:
        running.close(keep_data=True)
    return measured


def one_kill(running: System, body: dict[str, Any], policy: str) -> dict[str, float]:
    running.wait_ready()

    def ready(answer: Any) -> bool:
        return len(answer.tokens) >= KILL_AFTER_TOKENS and (policy != "hot" or moving.followed(running, answer))

    answer = running.stream("/v1/completions", body, watch=moving.kill_after(running, ready))
    recovery = moving.only(answer, "recoveries")
    gap = moving.gap_before_ms(answer, recovery["position"] - len(body["prompt"]))
    return {"gap_ms": gap, "token_ms": moving.token_ms(answer), **{part: recovery[part] for part in PARTS}}


if __name__ == "__main__":
    main()
