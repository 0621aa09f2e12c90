"""Writes the tables of docs/configuration.md from the settings classes: `.venv/bin/python -m ops.document`. A test keeps them true."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ops import config

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
START, END = "<!-- keys: written by `python -m ops.document` -->", "<!-- end of keys -->"
TITLES = {
    "": "Top level",
    "gateway": "`[gateway]`",
    "engine": "`[engine]`",
    "tiers": "`[tiers]`",
    "host": "`[host]`",
    "log": "`[log]`",
}
UNSAID = {
    "gateway.host": "address to listen on; beyond loopback an API key is needed",
    "gateway.port": "port to listen on",
    "tiers.sync_interval_ms": "longest time between syncs under `interval`; with `tail_interval_ms` the bound of what a power cut loses",
}
SHOWN_DEFAULTS = {
    "data_dir": "`~/.local/share/concordia` (XDG_DATA_HOME)",
    "model_cache": "`~/.cache/concordia/models` (XDG_CACHE_HOME)",
}


def tables() -> str:
    """All tables, one a section."""
    values = config.load(environment={"HOME": "/home"}).values()
    lines = []
    for section, title in TITLES.items():
        meanings = _meanings((config.SECTIONS[section] if section else config.Config).__doc__ or "")
        lines += [f"### {title}", "", "| key | default | environment | meaning |", "|---|---|---|---|"]
        for key, value in values.items():
            if key.rpartition(".")[0] == section:
                meaning = UNSAID.get(key) or meanings.get(key.rpartition(".")[2], "")
                shown = f"`{config.shown_value(key, value)}`" if value != "" else "none"
                lines.append(
                    f"| `{key}` | {SHOWN_DEFAULTS.get(key, shown)} | `{config.environment_name(key)}` | {meaning} |"
                )
        lines.append("")
    return "\n".join(lines)


def _meanings(docstring: str) -> dict[str, str]:
    """`name  what it means`, continued on deeper lines, as the settings classes document their fields."""
    found: dict[str, str] = {}
    name = ""
    for line in docstring.splitlines():
        match = re.fullmatch(r" {4}(\w+)  +(.*)", line)
        if match:
            name = match[1]
            found[name] = match[2]
        elif name and re.match(r" {8,}\S", line):
            found[name] += " " + line.strip()
        else:
            name = ""
    return {key: text.replace("|", "\\|") for key, text in found.items()}


def written(page: str) -> str:
    """The page with its tables renewed."""
    before, _, rest = page.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{tables()}{END}{after}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--check"]:
        sys.exit(PAGE.read_text() != written(PAGE.read_text()))
    PAGE.write_text(written(PAGE.read_text()))
