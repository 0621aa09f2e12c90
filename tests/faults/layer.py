"""A file layer that records and fails what a process writes (`layer.c`, LD_PRELOAD), and what a loss of power could leave of it.

What reached a file before its last sync is there; of what came after, any subset of its 4 KB pages may be, in any version
that the page had, for the kernel writes pages back one by one in an order of its own. A new name is there once its directory was synced.
"""

from __future__ import annotations

import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

PAGE = 4096
REPOSITORY = Path(__file__).parents[2]
_HEAD = struct.Struct("=IIQQ")


class Op(NamedTuple):
    """One recorded call: W(rite), S(ync), T(runcate), R(ename; data is the old name)."""

    kind: str
    name: str
    offset: int
    data: bytes


@dataclass(frozen=True)
class Layer:
    """The layer over `directory`; `control` holds the files that make it fail."""

    library: Path
    directory: Path
    control: Path
    trace: Path | None = None

    @classmethod
    def over(cls, directory: Path, build_dir: Path, *, trace: bool = False) -> Layer:
        """Build the layer (skips the test where there is no C compiler)."""
        compiler = shutil.which("cc") or shutil.which("gcc")
        if compiler is None:
            pytest.skip("no C compiler to build the file layer with")
        library, control = build_dir / "layer.so", build_dir / "control"
        source = Path(__file__).with_name("layer.c")
        done = subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-w", "-o", str(library), str(source), "-ldl"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        control.mkdir(exist_ok=True)
        return cls(library, Path(os.path.realpath(directory)), control, build_dir / "trace" if trace else None)

    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "PYTHONPATH": str(REPOSITORY),
            "LD_PRELOAD": str(self.library),
            "FAULT_DIR": str(self.directory),
            "FAULT_CONTROL": str(self.control),
            "FAULT_TRACE": str(self.trace or ""),
        }

    def fail(self, what: str, text: str = "") -> None:
        """Let calls fail from now on: see layer.c for the names."""
        (self.control / f".{what}").write_text(text)
        (self.control / f".{what}").rename(self.control / what)

    def heal(self, what: str) -> None:
        (self.control / what).unlink(missing_ok=True)

    def run(self, script: str, *arguments: str, timeout_s: float = 120) -> str:
        """Run a Python script under the layer to its end; returns its stdout."""
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments], env=self.environment(), cwd=REPOSITORY,
            capture_output=True, text=True, timeout=timeout_s, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def operations(self) -> list[Op]:
        """What was recorded, in order."""
        assert self.trace is not None
        raw, at, found = self.trace.read_bytes(), 0, list[Op]()
        while at < len(raw):
            kind, name_bytes, offset, size = _HEAD.unpack_from(raw, at)
            at += _HEAD.size
            name = raw[at : at + name_bytes].decode().lstrip("/")
            at += name_bytes
            carried = size if chr(kind) in "WR" else 0
            found.append(Op(chr(kind), name, offset, raw[at : at + carried]))
            at += carried
        return found


@dataclass
class Disk:
    """The state of one file while operations are replayed: what is certain, and what a loss of power may or may not leave."""

    durable: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes]] = field(default_factory=list)
    named: bool = False

    def apply(self, op: Op) -> None:
        if op.kind == "W":
            self.pending.append((op.offset, op.data))
        elif op.kind == "S":
            for offset, data in self.pending:
                _put(self.durable, offset, data)
            self.pending.clear()
        else:
            raise AssertionError(f"a store is never {op.kind}")

    def page_versions(self) -> list[tuple[int, list[bytes]]]:
        """Pages that aren't certain, each with every content that it may have, the certain one first."""
        size = max([len(self.durable), *(offset + len(data) for offset, data in self.pending)])
        now = bytearray(self.durable) + bytes(size - len(self.durable))
        versions: dict[int, list[bytes]] = {}
        for offset, data in self.pending:
            touched = range(offset // PAGE, (offset + len(data) - 1) // PAGE + 1)
            for page in touched:
                versions.setdefault(page, [bytes(now[page * PAGE : (page + 1) * PAGE])])
            _put(now, offset, data)
            for page in touched:
                versions[page].append(bytes(now[page * PAGE : (page + 1) * PAGE]))
        return sorted(versions.items())

    def after_power_loss(self, random: np.random.Generator, samples: int, exhaustive: int = 64) -> Iterator[bytes]:
        """Files that a loss of power now may leave: all of them if there are at most `exhaustive`, else a seeded sample."""
        pages = self.page_versions()
        choices = [range(len(versions)) for _, versions in pages]
        total = int(np.prod([float(len(choice)) for choice in choices])) if choices else 1
        if total <= exhaustive:
            picks: Iterator[tuple[int, ...]] = product(*choices)
        else:
            none, every = tuple(0 for _ in choices), tuple(len(choice) - 1 for choice in choices)
            drawn = (tuple(int(random.integers(len(choice))) for choice in choices) for _ in range(samples))
            picks = iter([none, every, *drawn])
        for pick in picks:
            file = bytearray(self.durable)
            for (page, versions), index in zip(pages, pick, strict=True):
                if index or page * PAGE < len(self.durable):
                    _put(file, page * PAGE, versions[index])
            yield bytes(file)


def _put(file: bytearray, offset: int, data: bytes) -> None:
    if len(file) < offset:
        file.extend(bytes(offset - len(file)))
    file[offset : offset + len(data)] = data
