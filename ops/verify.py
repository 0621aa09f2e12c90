"""`concordia verify`: prints what `tiers/verify.py` finds. Reads only; runs in the command's process."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import click

from ops.config import Config
from ops.errors import BadData, OpsError
from tiers.errors import TierError
from tiers.verify import Checked, Finding, verify


def run(config: Config, as_json: bool) -> None:
    """Check store and lanes of one installation. Raises BadData if anything is damaged."""
    paths = config.paths
    if not (paths.store / "data.mdb").exists():
        raise OpsError(f"nothing is stored in {paths.data_dir}; name the installation by --data-dir")
    checked = Checked()
    lane_dir = paths.lane_dir if paths.lane_dir.exists() else None
    findings = []
    try:
        for finding in verify(paths.store, lane_dir, map_bytes=config.tiers.store_map_bytes, checked=checked):
            findings.append(finding)
            if not as_json:
                _print(finding)
    except TierError as error:
        raise OpsError(f"{paths.store} can't be read: {error}") from error
    if as_json:
        click.echo(
            json.dumps(
                {"ok": not findings, "checked": asdict(checked), "findings": [_row(f) for f in findings]}, indent=2
            )
        )
    else:
        counts = ", ".join(f"{count} {name}" for name, count in asdict(checked).items())
        click.echo(f"checked {counts}: {'all whole' if not findings else f'{len(findings)} damaged'}")
    sys.stdout.flush()
    if findings:
        raise BadData("what is damaged is computed again when it is needed; nothing else is affected")


def _print(finding: Finding) -> None:
    click.echo(f"bad {finding.kind} {finding.key}: {finding.reason}")
    for part in finding.affected:
        click.echo(
            f"    session {part.session or '-'}, stream {part.stream}, tokens [{part.token_start}, {part.token_end})"
        )


def _row(finding: Finding) -> dict[str, Any]:
    return {
        "kind": finding.kind,
        "key": finding.key,
        "reason": finding.reason,
        "affected": [part._asdict() for part in finding.affected],
    }
