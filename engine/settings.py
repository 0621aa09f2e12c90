"""The engine's own section of the configuration. `ops/config.py` fills it; nothing here reads the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """One engine process.

    device           `cpu`, `cuda`, `cuda:N` or `auto`
    dtype            `float32`, `bfloat16`, `float16` or `auto` (float32 on a CPU, the checkpoint's on a GPU)
    threads          torch threads of one engine; 0 means cores // engines, at least 1
    slots            sequences that can be resident at once, and the largest decode batch
    context_tokens   longest sequence; 0 means what the model declares
    prefill_chunk    tokens of one prefill step; cuts lie at multiples of it, so a prefix computed twice has the same bits
    prefault_tokens  tokens of arena memory touched at start, so that a restore meets warm pages
    drain_s          how long SIGTERM lets streams be moved to other engines before the engine ends
    deterministic    an answer has the same bits whatever runs beside it, dies, or was cached; slower; refused where it can't be kept
    adapters         LoRA adapters that are there from the start: `name=directory`, several separated by commas
    point_tail_tokens    models with recurrent state: least distance of a rollback point before the end of a prompt
    point_answer_tokens  and a point every so many tokens of an answer
    points_resident      most rollback points kept on the device for one sequence; older ones are thinned out
    restore          `measured`: stored state is put back where this engine's own speeds say that computing it takes longer; `always`
    capture          copy what each step changed into the lane (off only to measure its cost)
    decode_graph     decode steps of fixed shapes, each recorded once and replayed: `auto` on a GPU, where a replay is one launch and proves
                     faster; `on` wherever they can be recorded (on a CPU they are called again, which gains nothing); `off`
    capture_launch   on a GPU, how the handlers that capture are started: `stream`, `graph` or `executor`; `auto` measures them and takes
                     the best; `copy` does without handlers
    """

    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: int = 0
    slots: int = 8
    context_tokens: int = 0
    prefill_chunk: int = 256
    prefault_tokens: int = 8192
    drain_s: float = 8.0
    deterministic: bool = False
    adapters: str = ""
    point_tail_tokens: int = 16
    point_answer_tokens: int = 32
    points_resident: int = 16
    restore: Literal["measured", "always"] = "measured"
    capture: bool = True
    decode_graph: Literal["auto", "on", "off"] = "auto"
    capture_launch: Literal["auto", "copy", "stream", "graph", "executor"] = "auto"
