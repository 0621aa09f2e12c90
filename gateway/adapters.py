"""LoRA adapters by name. DATA/adapters/<digest>/ holds a copy of each one's files, DATA/adapters/index.json their names.

A stream keeps to the digest that its name meant when it was admitted: new weights under the same name are another adapter, and a recovery
finds the old ones here, even if they were unloaded or deleted meanwhile. On the event loop; files are copied on a thread.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog

from engine.messages import ADAPTER_FILES, adapter_digest
from gateway import metrics
from gateway.errors import bad_request

log = structlog.get_logger()

DRAFT = ".copy-"


class AdapterTable:
    """All adapters of this gateway."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._index = directory / "index.json"
        self.names: dict[str, str] = {}
        # Open files of each digest: whole as long as they are, even if deleted.
        self._held: dict[str, list[BinaryIO]] = {}
        if self._index.exists():
            self.names = msgspec.json.decode(self._index.read_bytes(), type=dict[str, str])
        for left in directory.glob(f"{DRAFT}*"):  # of a gateway that was killed
            shutil.rmtree(left, ignore_errors=True)
        for path in directory.glob("[!.]*") if directory.exists() else ():
            self._hold(path.name)

    def directory(self, digest: str) -> Path:
        """Where an adapter's files lie."""
        return self._directory / digest

    def keep(self, source: Path) -> str:
        """Copy an adapter's files; returns their digest. Raises ApiError if they are not there."""
        try:
            digest = adapter_digest(source)
        except OSError as error:
            files = " and ".join(ADAPTER_FILES)
            raise bad_request(f"lora_path: expected a directory with {files}: {error}", "lora_path") from error
        target = self.directory(digest)
        if not target.exists():
            with self._draft() as draft:
                for name in ADAPTER_FILES:
                    shutil.copyfile(source / name, draft / name)
                try:
                    os.rename(draft, target)
                except OSError:
                    if not self._is_whole(digest):
                        raise  # else a request that came at the same time was first
        self._hold(digest)
        return digest

    def look_for_files(self) -> None:
        """What was deleted under this process is written anew. On a thread: they may be large."""
        try:
            lost = [digest for digest in list(self._held) if not self._is_whole(digest)]
            if not lost and (self._index.exists() or not self.names):
                return
        except OSError:
            return  # nobody knows; asked again
        metrics.files_deleted.labels("adapters").inc()
        log.error(
            "adapter.files_gone", path=str(self._directory), hint="they were deleted or moved, and are written anew"
        )
        try:
            for digest in lost:
                self._write_anew(digest)
            self._write()
        except (OSError, ValueError) as error:  # no room, or its files were let go of meanwhile
            log.error("adapter.not_written_anew", path=str(self._directory), error=str(error), hint="it is tried again")

    def add(self, name: str, digest: str) -> None:
        """Give a name to an adapter that is kept; a name that meant another one means this one from now on."""
        self.names[name] = digest
        self._write()
        log.info("adapter.named", name=name, digest=digest)

    def remove(self, name: str) -> str:
        """Take a name back; returns its digest if no other name means it, else ""."""
        digest = self.names.pop(name)
        self._write()
        return "" if digest in self.names.values() else digest

    def sweep(self, used: set[str]) -> None:
        """Delete the files of adapters that have no name and no live stream."""
        if not self._directory.exists():
            return
        wanted = used | set(self.names.values())
        for path in self._directory.iterdir():
            if path.is_dir() and path.name not in wanted and not path.name.startswith("."):
                for file in self._held.pop(path.name, ()):
                    file.close()
                shutil.rmtree(path, ignore_errors=True)

    def _hold(self, digest: str) -> None:
        if digest not in self._held and self._is_whole(digest):
            self._held[digest] = [open(self.directory(digest) / name, "rb") for name in ADAPTER_FILES]

    def _is_whole(self, digest: str) -> bool:
        return all((self.directory(digest) / name).exists() for name in ADAPTER_FILES)

    def _write_anew(self, digest: str) -> None:
        with self._draft() as draft:
            for name, file in zip(ADAPTER_FILES, self._held[digest], strict=True):
                file.seek(0)
                with open(draft / name, "wb") as target:
                    shutil.copyfileobj(file, target, 1 << 20)
            shutil.rmtree(self.directory(digest), ignore_errors=True)
            os.rename(draft, self.directory(digest))

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """A directory to be filled and renamed; where that fails nothing of it is left, which matters most where there is no room."""
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = Path(tempfile.mkdtemp(dir=self._directory, prefix=DRAFT))
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _write(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        temporary = self._index.with_suffix(".new")
        with open(temporary, "wb") as file:  # a loss of power leaves the old one or this one
            file.write(msgspec.json.encode(self.names))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._index)


def parse_setting(text: str) -> dict[str, Path]:
    """`name=directory, name=directory` -> what to load at the start. Raises ValueError."""
    wanted = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, directory = part.partition("=")
        if not equals or not name.strip() or not directory.strip():
            raise ValueError(f"engine.adapters: expected name=directory, got {part!r}")
        wanted[name.strip()] = Path(directory.strip()).expanduser()
    return wanted
