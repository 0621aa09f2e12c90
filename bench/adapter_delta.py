"""What does a training step of a LoRA cost to keep, against copying the state whole?

Question  Pages that a step changed against all pages of the job; time to capture a step against copying everything; and whether a
          run that is killed and resumed ends bit-equal to one that is not.
Regime    Demo model, ADAPTERS LoRAs of rank 8 on q_proj and v_proj (made by peft), AdamW, one sequence of 32 tokens a step, which trains
          one of the adapters in turn; one process. Each step is captured by engine/regions.py into a file on the disk that holds
          this checkout (page cache, no fsync). Frozen base weights are constant, so never scanned. The killed run gets SIGKILL in a step.
Baseline  all pages: base weights, adapters and optimiser state. Time: the same bytes written to a file in one go, in the same
          process. `own pages`, `own time`: adapters and optimiser state alone.
Unit      pages, ms; ratio is all / changed. (Published for such a job: 57 times fewer pages, 299 times less time.)
Seed      --seed
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import report, scratch
from bench.model import model_directory

SEQUENCE_TOKENS = 32
RANK = 8
ADAPTERS = 4
TEXT = report.ROOT / "README.md"  # to train on


def main() -> None:
    if "--trainer" in sys.argv:
        train(_trainer_arguments())
        return
    options = report.arguments(__doc__)
    steps, killed_after = (5, 2) if options.quick else (16, 6)
    rows = report.Report("adapter_delta", options)
    directory = model_directory(options.model)
    with scratch.directory("adapter", scratch.CHECKOUT) as where:
        calm = run(directory, where / "calm", steps, options, measure=True)
        killed = run(directory, where / "killed", steps, options, killed_after)
        resumed = run(directory, where / "killed", steps, options)
    if resumed[0]["resumed_at"] < killed_after - 1:
        raise AssertionError(f"resumed at {resumed[0]['resumed_at']}, killed after {killed_after}")
    if calm[-1]["digest"] != resumed[-1]["digest"]:
        raise AssertionError("the resumed run's weights differ from the uninterrupted run's")
    report.say(f"  killed after {killed_after} steps, resumed at {resumed[0]['resumed_at']}, ended bit-equal")
    taken = [line for line in calm if "changed_pages" in line][2:]  # the first is the base; B is zero before the second
    whole = calm[0]
    pages = report.median([line["changed_pages"] for line in taken])
    spent = report.median([line["capture_ms"] for line in taken])
    rows.add(report.Row("pages", pages, "pages", whole["all_pages"], whole["all_pages"] / pages, "57 published"))
    rows.add(report.Row("time", spent, "ms", whole["copy_ms"], whole["copy_ms"] / spent, "299 published"))
    rows.add(report.Row("own pages", pages, "pages", whole["own_pages"], whole["own_pages"] / pages))
    rows.add(report.Row("own time", spent, "ms", whole["own_copy_ms"], whole["own_copy_ms"] / spent))
    rows.details = {"calm": calm, "killed": killed, "resumed": resumed}
    rows.finish()


def run(
    model: Path,
    directory: Path,
    steps: int,
    options: argparse.Namespace,
    kill_after: int = 0,
    *,
    measure: bool = False,
) -> list[dict[str, Any]]:
    """One training process; what it printed. With `kill_after` it gets SIGKILL once it said that it took so many steps."""
    command = [
        sys.executable, "-m", "bench.adapter_delta", "--trainer", str(directory), "--steps", str(steps),
        "--weights", str(model), "--seed", str(options.seed), "--threads", str(options.threads),
    ]  # fmt: skip
    if measure:
        command.append("--measure")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines = []
    try:
        for text in process.stdout:
            lines.append(json.loads(text))
            if kill_after and sum("step" in line for line in lines) == kill_after:
                time.sleep(0.05)  # into the next step
                process.send_signal(signal.SIGKILL)
                break
        status = process.wait()
    finally:
        process.kill()
        process.communicate()
    if status and not kill_after:
        raise AssertionError(f"the trainer ended with {status}")
    return lines


# ---------------------------------------------------------------- the training process


def _trainer_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--trainer", type=Path, required=True)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--measure", action="store_true", help="copy everything as well, for the baseline")
    for name in ("--steps", "--seed", "--threads"):
        parser.add_argument(name, type=int, required=True)
    return parser.parse_args()


def train(options: argparse.Namespace) -> None:
    """Train up to `--steps`, from where the log ends; one JSON line a step."""
    import torch
    from peft import LoraConfig, get_peft_model
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    from engine.regions import OpaqueLog

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.weights, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    tuned = get_peft_model(model, config, adapter_name="a0")
    for index in range(1, ADAPTERS):
        tuned.add_adapter(f"a{index}", config)
    names = [f"a{index}" for index in range(ADAPTERS)]
    jobs = {name: Job(tuned, name) for name in names}
    log = OpaqueLog.open(options.trainer / "lora.opaque")
    for name, job in jobs.items():
        for part, tensor in job.state.items():
            log.register(f"{name}.{part}", tensor)
    base = [p for name, p in tuned.named_parameters() if "lora_" not in name]
    for index, parameter in enumerate(base):
        log.register(f"base.{index}", parameter.data, constant=True)
    restored = log.restore()
    first = restored.note["step"] + 1 if restored else 0
    own = [tensor for job in jobs.values() for tensor in job.state.values()]
    whole = whole_copy(options.trainer, base, own) if options.measure else {}
    say(resumed_at=first, own_pages=log.page_count, **whole)
    tokens = Tokenizer.from_file(str(options.weights / "tokenizer.json")).encode(TEXT.read_text()).ids
    for step in range(first, options.steps):
        name = names[step % ADAPTERS]
        tuned.set_adapter(name)
        start = (step * 37) % max(1, len(tokens) - SEQUENCE_TOKENS)
        ids = torch.tensor([tokens[start : start + SEQUENCE_TOKENS]])
        loss = tuned(input_ids=ids, labels=ids).loss
        loss.backward()
        jobs[name].step()
        began = time.perf_counter()
        done = log.capture({"step": step})
        capture_ms = 1000 * (time.perf_counter() - began)
        say(step=step, loss=float(loss.detach()), changed_pages=done.changed_pages, capture_ms=capture_ms)
    say(digest=digest(own))


class Job:
    """One adapter with its AdamW state, each part in one flat tensor that stays where it is."""

    def __init__(self, tuned: Any, name: str) -> None:
        import torch

        self.parameters = [p for key, p in tuned.named_parameters() if f".{name}." in key]
        count = sum(p.numel() for p in self.parameters)
        self.state = {
            "weights": torch.zeros(count),
            "exp_avg": torch.zeros(count),
            "exp_avg_sq": torch.zeros(count),
            "steps": torch.zeros(len(self.parameters)),
        }
        self.optimiser = torch.optim.AdamW(self.parameters, lr=1e-3, foreach=False)
        at = 0
        for index, parameter in enumerate(self.parameters):
            span = slice(at, at + parameter.numel())
            parts = {key: self.state[key][span].view(parameter.shape) for key in ("weights", "exp_avg", "exp_avg_sq")}
            parts["weights"].copy_(parameter.data)
            parameter.data = parts["weights"]
            self.optimiser.state[parameter] = {
                "step": self.state["steps"][index],
                "exp_avg": parts["exp_avg"],
                "exp_avg_sq": parts["exp_avg_sq"],
            }
            at = span.stop

    def step(self) -> None:
        self.optimiser.step()
        self.optimiser.zero_grad()


def whole_copy(directory: Path, base: list[Any], own: list[Any]) -> dict[str, float]:
    """Pages and time of copying everything, and of copying what is trained; the median of three."""
    from engine.regions import PAGE_BYTES

    sizes = {"all": [*base, *own], "own": own}
    times = {key: report.median([timed_copy(directory, tensors) for _ in range(3)]) for key, tensors in sizes.items()}
    all_pages = sum(-(-t.numel() * t.element_size() // PAGE_BYTES) for t in sizes["all"])
    return {"all_pages": all_pages, "copy_ms": times["all"], "own_copy_ms": times["own"]}


def timed_copy(directory: Path, tensors: list[Any]) -> float:
    """Write tensors to a file, one after the other; ms."""
    path = directory / "whole"
    began = time.perf_counter()
    with open(path, "wb", buffering=0) as file:
        for tensor in tensors:
            view = memoryview(tensor.detach().reshape(-1).numpy()).cast("B")
            while view:
                view = view[os.write(file.fileno(), view) :]
    took = 1000 * (time.perf_counter() - began)
    path.unlink()
    return took


def digest(tensors: list[Any]) -> str:
    import xxhash

    whole = xxhash.xxh3_128()
    for tensor in tensors:
        whole.update(tensor.numpy())
    return whole.hexdigest()


def say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
