"""Hands files to the command line, all in this process, and looks at everything that may come of it."""

from __future__ import annotations

import faulthandler
import hashlib
import io
import json
import os
import random
import resource
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

EXPLAINED, REFUSED, BROKEN = "explained", "refused", "failed"
PATIENCE = 60.0  # seconds for a file; the largest picture that is allowed takes a quarter of it
GROUPS = (1, 1, 1, 2, 5, 16)  # files in a call
PEAK = 5.5e9  # bytes; the largest picture that is allowed takes 4.9e9
GROWTH = 0.5e9  # bytes that may stay for good


@dataclass(frozen=True)
class Mode:
    """A way to call the command line, and how many files of each kind it writes for a photo."""

    options: tuple[str, ...]
    files: dict[str, int]


PLAIN, JSON = Mode((), {".png": 1, ".npy": 1, ".json": 1}), Mode(("--json",), {".png": 1, ".npy": 1, ".json": 1})
MODES = (
    *(PLAIN,) * 5, *(JSON,) * 3,
    Mode(("--method", "saliency", "--method", "inputxgradient"), {".png": 3, ".npy": 2, ".json": 2}),
    Mode(("--method", "guidedbackprop", "--top-k", "2", "--json"), {".png": 3, ".npy": 2, ".json": 2}),
    Mode(("--concepts", "2"), {".png": 1, ".npy": 2, ".json": 1}), Mode(("--inspect",), {}),
)  # fmt: skip


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
            f"{' '.join(self.mode.options) or 'no options'}, exit code {self.code}, {self.seconds:.1f} s",
            *self.problems, *map(str, self.cases), *map(repr, self.paths),
            "standard output:", self.out[-4000:], "standard error:", self.err[-4000:],
        ]  # fmt: skip
        return "\n".join(parts)


@dataclass
class Summary:
    """The figures of a run."""

    results: Counter[tuple[str, str]] = field(default_factory=Counter)
    places: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: int = 0
    seconds: float = 0.0
    slowest: tuple[float, str] = (0.0, "")
    growth: float = 0.0
    peak: float = 0.0
    failures: list[str] = field(default_factory=list)

    def count(self, result: str) -> int:
        """Return how many files came to a result."""
        return sum(number for (_, found), number in self.results.items() if found == result)

    def add(self, call: Call) -> None:
        """Enter what came of a call."""
        self.calls += 1
        self.seconds += call.seconds
        for case in call.cases:
            self.results[case.mutation, call.result(case)] += 1
            self.places[case.place, call.result(case)] += 1
        if len(call.cases) == 1:
            self.slowest = max(self.slowest, (call.seconds, str(call.cases[0])))


def fuzz(count: int, seed: int, keep: Path, progress: Callable[[int, Summary], None] | None = None) -> Summary:
    """Hand ``count`` files to the command line, some alone and some together; keep those that break it.

    Raises nothing on account of the files: what went wrong is in the summary's ``failures``, and in ``keep``.
    """
    draw, stream, summary = random.Random(f"groups {seed}"), cases(seed), Summary()
    slowest_group: Call | None = None
    try_alone(next(cases(seed)))  # what is loaded once is no growth
    before, done = resident(), 0
    while done < count:
        group = list(islice(stream, min(draw.choice(GROUPS), count - done)))
        call = check(group, draw.choice(MODES))
        if call.problems and len(group) > 1:
            _enter_alone(call, summary, keep)
        else:
            _enter(call, summary, keep)
            if len(group) > 1 and (slowest_group is None or call.seconds > slowest_group.seconds):
                slowest_group = call
        done += len(group)
        summary.growth, summary.peak = resident() - before, highest()
        if progress is not None:
            progress(done, summary)
    if slowest_group is not None and slowest_group.seconds > summary.slowest[0]:
        alone = [(check([case], slowest_group.mode).seconds, str(case)) for case in slowest_group.cases]
        summary.slowest = max(summary.slowest, *alone)
    if summary.growth > GROWTH or summary.peak > PEAK:
        summary.failures.append(f"memory: {summary.growth / 1e6:.0f} MB stayed, {summary.peak / 1e6:.0f} MB at most")
    return summary


def try_alone(case: Case, mode: Mode = PLAIN) -> Call:
    """Hand over one file."""
    return check([case], mode)


def _enter_alone(together: Call, summary: Summary, keep: Path) -> None:
    """Try the files of a call that went wrong one by one; where none is to blame alone, all of them are together."""
    alone = [check([case], together.mode) for case in together.cases]
    if any(call.problems for call in alone):
        for call in alone:
            _enter(call, summary, keep)
    else:
        _enter(together, summary, keep)


def _enter(call: Call, summary: Summary, keep: Path) -> None:
    summary.add(call)
    if not call.problems:
        return
    folder = keep / call.cases[0].token
    (folder / "files").mkdir(parents=True, exist_ok=True)
    for case in call.cases:
        case.write(folder / "files")
    (folder / "report.txt").write_text(str(call), "utf-8", "backslashreplace")
    summary.failures.append(f"{folder}: {call.problems[0].splitlines()[-1]} [{call.cases[0]}]")


def check(group: Sequence[Case], mode: Mode) -> Call:
    """Call the command line with some files, and look at all that it printed, wrote and left."""
    call = Call(group, mode)
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        folder, output = Path(name) / "in", Path(name) / "out"
        folder.mkdir()
        call.paths = [case.write(folder) for case in group]
        before = _state(folder)
        _run(call, output)
        if _state(folder) != before:
            call.problems.append("the files handed over were altered, or others put beside them")
        _check_printed(call)
        _check_written(call, output)
        _allow_all(folder)
    return call


def _run(call: Call, output: Path) -> None:
    where = ["--output", str(output)] if call.mode.files else []  # which would have no effect
    arguments = [*call.paths, *where, *call.mode.options, "--model", "tiny"]
    begun = time.monotonic()
    with _captured() as (out, err, screen), _patient(PATIENCE * len(call.cases), screen):
        try:
            call.code = main(arguments)
        except SystemExit as stop:
            call.problems.append(f"main ended the program with {stop.code!r}")
        except BaseException as error:  # whatever comes out, a hang included, is what we look for
            text = "".join(traceback.format_exception(error))
            call.problems.append(f"main raised:\n{text}")
    call.seconds = time.monotonic() - begun
    if call.code == 130:
        raise KeyboardInterrupt  # of the person who runs this
    call.out, call.err = (path.read_text("utf-8", "backslashreplace") for path in (out, err))
    for path in (out, err):
        path.unlink()


@contextmanager
def _captured() -> Iterator[tuple[Path, Path, int]]:
    """Send what is printed to files, also by libraries in C; yield these and a descriptor of the real screen."""
    kept = sys.stdout, sys.stderr
    screens = [os.dup(1), os.dup(2)]
    files = [tempfile.NamedTemporaryFile("wb", prefix="fuzz-", delete=False) for _ in screens]  # noqa: SIM115
    try:
        for stream in kept:
            stream.flush()
        for descriptor, file in enumerate(files, start=1):
            os.dup2(file.fileno(), descriptor)
        sys.stdout, sys.stderr = (io.TextIOWrapper(file, "utf-8", write_through=True) for file in files)
        yield Path(files[0].name), Path(files[1].name), screens[1]
    finally:
        for descriptor, screen in enumerate(screens, start=1):
            os.dup2(screen, descriptor)
            os.close(screen)
        for wrapped in (sys.stdout, sys.stderr):
            wrapped.close()
        sys.stdout, sys.stderr = kept


class Hang(BaseException):
    """A call took longer than anything should; not an error that anybody would catch."""


@contextmanager
def _patient(seconds: float, screen: int) -> Iterator[None]:
    """Raise `Hang` after some time; where even that cannot get through, show where it hangs and end the process."""

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


def _allow_all(folder: Path) -> None:
    for path in folder.iterdir():
        if not path.is_symlink():
            path.chmod(0o700)  # so that the folder can be removed


def _check_printed(call: Call) -> None:
    """One clear line for each file that was refused, nothing else that looks like an error, and the right code."""
    problem = call.problems.append
    for line in (call.out + "\n" + call.err).split("\n"):
        if "Traceback" in line or "Exception ignored" in line:
            problem(f"a traceback was printed: {line!r}")
        if not _shown(line) and "--json" not in call.mode.options:
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
        _check_document(call)


def _shown(line: str) -> bool:
    return not any(ord(c) < 32 or 127 <= ord(c) < 160 or c in "\u2028\u2029" for c in line)


def _check_document(call: Call) -> None:
    try:
        document = _strict(call.out)
        if len(document["results"]) + len(document["errors"]) != len(call.cases):
            call.problems.append("the JSON document does not account for every file")
    except (ValueError, KeyError) as error:
        call.problems.append(f"standard output is no JSON document: {error}")


def _strict(text: str) -> Any:
    """Read JSON as others do, who know no NaN."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _check_written(call: Call, output: Path) -> None:
    """Every file that was explained has all of its results, and these are whole; a refused one has none."""
    written = sorted(output.iterdir()) if output.exists() else []
    owned: Counter[Path] = Counter()
    for case in call.cases:
        own = [path for path in written if path.name.startswith(case.token)]
        owned.update(own)
        refused = any(case.token in line for line in call.complaints)
        expected = {} if refused else call.mode.files
        kinds = Counter(path.suffix for path in own)
        if kinds != expected and not call.problems:
            call.problems.append(f"{case.token} is {'refused' if refused else 'explained'}, but wrote {dict(kinds)}")
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
    elif path.suffix == ".json":
        _strict(path.read_text("utf-8"))
    else:
        raise ValueError("no kind of file that is written")


def resident() -> float:
    """Return the bytes of memory that this process has now; where that is not told, the most that it ever had."""
    try:
        pages = Path("/proc/self/statm").read_text().split()[1]
    except OSError:
        return highest()
    return float(pages) * resource.getpagesize()


def highest() -> float:
    """Return the most bytes of memory that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return float(peak if sys.platform == "darwin" else peak * 1024)


def clear(keep: Path) -> None:
    """Remove what an earlier run has kept."""
    shutil.rmtree(keep, ignore_errors=True)
