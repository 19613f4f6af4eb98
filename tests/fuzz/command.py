"""Hands files to the command line, all in this process, and looks at everything that may come of
it."""

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from PIL import Image

from explain.cli import main
from explain.cli.output import DONE, FAILED
from tests.fuzz.files import Case, cases

EXPLAINED = "explained"
REFUSED = "refused"
BROKEN = "failed"
PATIENCE = 60.0  # seconds for a file; the largest picture that is allowed takes a quarter of it
GROUPS = (1, 1, 1, 2, 5, 16)  # files in a call


@dataclass(frozen=True)
class Mode:
    """A way to call the command line, and how many files of each kind it writes for a photo."""

    options: tuple[str, ...]
    files: dict[str, int]


PLAIN = Mode((), {".png": 1, ".npy": 1, ".json": 1})
JSON = Mode(("--json",), {".png": 1, ".npy": 1, ".json": 1})
MODES = (
    *(PLAIN,) * 5,
    *(JSON,) * 3,
    Mode(
        ("--method", "saliency", "--method", "inputxgradient"), {".png": 3, ".npy": 2, ".json": 2}
    ),
    Mode(
        ("--method", "guidedbackprop", "--top-k", "2", "--json"), {".png": 3, ".npy": 2, ".json": 2}
    ),
    Mode(("concepts", "-k", "2"), {".png": 1, ".npy": 2, ".json": 1}),
    Mode(("inspect",), {}),
)


@dataclass
class Call:
    """What came of one call of the command line."""

    cases: Sequence[Case]
    mode: Mode
    paths: list[str] = field(default_factory=list)
    code: int | None = None
    out: str = ""
    err: str = ""
    seconds: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """The lines on standard error that say that something could not be explained."""
        return [line for line in self.err.splitlines() if line.startswith("explain: ")]

    def result(self, case: Case) -> str:
        """Say what became of one of the files."""
        if self.problems:
            return BROKEN
        return REFUSED if any(case.token in line for line in self.complaints) else EXPLAINED

    def __str__(self) -> str:
        parts = [
            (
                f"{' '.join(self.mode.options) or 'no options'}, exit code {self.code}, "
                f"{self.seconds:.1f} s"
            ),
            *self.problems,
            *map(str, self.cases),
            *map(repr, self.paths),
            "standard output:",
            self.out[-4000:],
            "standard error:",
            self.err[-4000:],
        ]
        return "\n".join(parts)


@dataclass
class Summary:
    """The figures of a run."""

    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)

    def count(self, result: str) -> int:
        """Return how many files came to a result."""
        return sum(number for (_, found), number in self.results.items() if found == result)


def fuzz(
    count: int, seed: int, keep: Path, progress: Callable[[int, Summary], None] | None = None
) -> Summary:
    """Hand ``count`` files to the command line, some alone and some together; keep those that break
    it.

    Raises nothing on account of the files: what went wrong is in the summary's ``failures``, and in
    ``keep``.
    """
    draw = random.Random(f"groups {seed}")
    stream = cases(seed)
    summary = Summary()
    done = 0
    while done < count:
        group = list(islice(stream, min(draw.choice(GROUPS), count - done)))
        call = check(group, draw.choice(MODES))
        done += len(group)
        summary.calls += 1
        summary.seconds += call.seconds
        summary.results.update((case.mutation, call.result(case)) for case in group)
        if call.problems:
            folder = keep / group[0].token
            (folder / "files").mkdir(parents=True, exist_ok=True)
            for case in group:
                case.write(folder / "files")
            (folder / "report.txt").write_text(str(call), "utf-8", "backslashreplace")
            summary.failures.append(f"{folder}: {call.problems[0].splitlines()[-1]} [{group[0]}]")
        if progress is not None:
            progress(done, summary)
    return summary


def check(group: Sequence[Case], mode: Mode) -> Call:
    """Call the command line with some files, and look at all that it printed, wrote and left."""
    call = Call(group, mode)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder = Path(name) / "in"
        output = Path(name) / "out"
        folder.mkdir()
        call.paths = [case.write(folder) for case in group]
        before = _state(folder)
        _run(call, Path(name), output)
        if _state(folder) != before:
            call.problems.append("the files handed over were altered, or others put beside them")
        _check_printed(call)
        _check_written(call, output)
        for path in folder.iterdir():
            if not path.is_symlink():
                path.chmod(0o700)  # so that the folder can be removed
    return call


def _run(call: Call, folder: Path, output: Path) -> None:
    where = ["--output", str(output)] if call.mode.files else []  # which would have no effect
    arguments = [*call.mode.options, *call.paths, *where, "--model", "tiny"]
    begun = time.monotonic()
    printed = [folder / "stdout", folder / "stderr"]
    with _captured(printed) as screen, _patient(PATIENCE * len(call.cases), screen):
        try:
            call.code = main(arguments)
        except BaseException as error:  # whatever comes out, a hang included, is what we look for
            call.problems.append("main raised:\n" + "".join(traceback.format_exception(error)))
    call.seconds = time.monotonic() - begun
    if call.code == 130:
        raise KeyboardInterrupt  # of the person who runs this
    call.out, call.err = (path.read_text("utf-8", "backslashreplace") for path in printed)


@contextmanager
def _captured(files: Sequence[Path]) -> Iterator[int]:
    """Send what is printed to two files, also by libraries in C; yield a descriptor of the real
    screen."""
    streams = (sys.stdout, sys.stderr)
    screens = [os.dup(1), os.dup(2)]
    sys.stdout, sys.stderr = (path.open("w", encoding="utf-8", buffering=1) for path in files)
    try:
        for descriptor, stream in enumerate((sys.stdout, sys.stderr), start=1):
            streams[descriptor - 1].flush()
            os.dup2(stream.fileno(), descriptor)
        yield screens[1]
    finally:
        for descriptor, stream in enumerate((sys.stdout, sys.stderr), start=1):
            stream.close()
            os.dup2(screens[descriptor - 1], descriptor)
            os.close(screens[descriptor - 1])
        sys.stdout, sys.stderr = streams


class Hang(BaseException):
    """A call took longer than anything should; not an error that anybody would catch."""


@contextmanager
def _patient(seconds: float, screen: int) -> Iterator[None]:
    """Raise `Hang` after some time; where even that cannot get through, show where it hangs and end
    the process."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise Hang(f"no answer in {seconds:.0f} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    faulthandler.dump_traceback_later(2 * seconds, exit=True, file=screen)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Return all that could be altered in a folder."""
    found: dict[str, tuple[object, ...]] = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            regular = os.path.isfile(path) and not os.path.islink(path) and os.access(path, os.R_OK)
            digest = hashlib.sha256(Path(path).read_bytes()).hexdigest() if regular else ""
            found[path] = status.st_mode, status.st_size, status.st_mtime_ns, digest
    return found


def _check_printed(call: Call) -> None:
    """One clear line for each file that was refused, nothing else that looks like an error, and the
    right code."""
    problem = call.problems.append
    for line in (call.out + "\n" + call.err).split("\n"):
        if "Traceback" in line or "Exception ignored" in line:
            problem(f"a traceback was printed: {line!r}")
        steers = any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029" for c in line)
        if steers and "--json" not in call.mode.options:
            problem(f"a line would do things to the terminal: {line!r}")
    odd = [line for line in call.err.splitlines() if not line.startswith(("explain: ", "note: "))]
    if odd:
        problem(f"standard error has {odd[0]!r}")
    for case in call.cases:
        said = sum(case.token in line for line in call.complaints)
        if said > 1:
            problem(f"{said} lines for one bad file")
        if said and case.good and call.mode in (PLAIN, JSON):
            problem(f"a good photo was refused: {call.complaints}")
    if call.code not in (DONE, FAILED) or (call.code == FAILED) != bool(call.complaints):
        problem(f"exit code {call.code} with {len(call.complaints)} complaints")
    if any(len(line) > 1500 for line in call.complaints):
        problem("a message that nobody would read to its end")
    if "--json" in call.mode.options:
        try:
            document = _strict(call.out)
            if len(document["results"]) + len(document["errors"]) != len(call.cases):
                problem("the JSON document does not account for every file")
        except (ValueError, KeyError) as error:
            problem(f"standard output is no JSON document: {error}")


def _strict(text: str) -> Any:
    """Read JSON as others do, who know no NaN."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _check_written(call: Call, output: Path) -> None:
    """Every file that was explained has all of its results, and these are whole; a refused one has
    none."""
    written = sorted(output.iterdir()) if output.exists() else []
    owned: set[Path] = set()
    for case in call.cases:
        own = [path for path in written if path.name.startswith(case.token)]
        owned.update(own)
        refused = any(case.token in line for line in call.complaints)
        kinds = Counter(path.suffix for path in own)
        if kinds != ({} if refused else call.mode.files) and not call.problems:
            call.problems.append(
                f"{case.token} is {'refused' if refused else 'explained'}, but wrote {dict(kinds)}"
            )
    strays = [path.name for path in written if path not in owned]
    if strays:
        call.problems.append(f"left behind: {strays}")
    for path in written:
        try:
            _read(path)
        except Exception as error:  # whatever its reader raises, the file is not whole
            call.problems.append(f"{path.name} is not whole: {error!r}")


def _read(path: Path) -> None:
    if path.suffix == ".png":
        with Image.open(path) as picture:
            picture.load()
    elif path.suffix == ".npy":
        if not np.isfinite(np.load(path, allow_pickle=False)).all():
            raise ValueError("it has values that are not finite")
    else:
        _strict(path.read_text("utf-8"))


def clear(keep: Path) -> None:
    """Remove what an earlier run has kept."""
    shutil.rmtree(keep, ignore_errors=True)
