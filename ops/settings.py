"""Sections of the configuration that belong to `ops` itself: the host agent's and the log's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Host agent and `serve`: how engines are started, watched, fenced and started again.

    engines             engine processes on this machine
    nursery             fork engines from a process that has imported torch already (off: start each from scratch)
    adopt               take over engines that are found running (off: they are killed and started again)
    hang_floor_ms       an engine of which nothing ran or wanted to run for this long is hung, unless the bound that it learned is longer
    stopped_ms          an engine that was stopped (SIGSTOP) and silent for this long is hung
    spin_limit_s        an engine that computed for this long without a heartbeat is hung
    silent_limit_s      a gateway, host agent or nursery that stands still for so long gets SIGCONT if it was stopped, SIGKILL if it is
                        stuck; the keeper has twelve times as long, and may compute as much longer; 0: never
    load_timeout_s      an engine that isn't ready after this long is killed and started again
    watch_interval_ms   how often heartbeats are looked at
    restart_backoff_ms  wait before an engine that died is started again while another serves; doubles with each death in a row
    restart_limit_ms    longest such wait
    restart_reset_s     an engine that lived this long starts over at the shortest wait
    stop_timeout_s      how long a stop waits for an engine or the keeper before it kills it
    """

    engines: int = 2
    nursery: bool = True
    adopt: bool = True
    hang_floor_ms: int = 500
    stopped_ms: int = 100
    spin_limit_s: float = 60.0
    silent_limit_s: float = 5.0
    load_timeout_s: float = 300.0
    watch_interval_ms: int = 50
    restart_backoff_ms: int = 500
    restart_limit_ms: int = 5_000
    restart_reset_s: float = 60.0
    stop_timeout_s: float = 10.0


@dataclass(frozen=True, slots=True)
class LogSettings:
    """What is written to stderr.

    format  `console` for people, `json` one object a line, `auto` console on a terminal and JSON otherwise
    level   least severe event that is written
    """

    format: Literal["auto", "console", "json"] = "auto"
    level: Literal["debug", "info", "warning", "error"] = "info"
