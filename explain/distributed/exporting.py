"""A model written into an archive by ``torch.package``, and a report of what became of every module of code."""

from __future__ import annotations

import json
import linecache
import os
import platform
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import IO, TYPE_CHECKING, TypeAlias, cast

import torch
from torch import nn

from explain._utils.errors import HookError, raised
from explain._utils.version import __version__
from explain.hooks.guard import call, site_of

if TYPE_CHECKING:
    from torch.package.package_importer import PackageImporter


HOME = "explain_archive"  # the package within the archive that holds all that is not code


@dataclass(frozen=True)
class PackageReport:
    """What became of each module of code: ``interned`` is in the archive, ``externed`` must be installed where it is
    opened, ``mocked`` raises when it is used. ``versions`` is what wrote the archive.
    """

    interned: tuple[str, ...]
    externed: tuple[str, ...]
    mocked: tuple[str, ...]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        kinds = {"interned": self.interned, "externed": self.externed, "mocked": self.mocked}
        lines = [_row(f"{kind:<8} {len(names):>3}", ", ".join(names)) for kind, names in kinds.items()]
        return "\n".join([*lines, _row("written by", self.writers())])

    def writers(self) -> str:
        """Return the names and versions of what wrote the archive."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())


def about_of(importer: PackageImporter) -> tuple[PackageReport, tuple[str, ...] | None]:
    """Return the report of an open archive, and its labels."""
    about = json.loads(importer.load_text(HOME, "about.json"))
    versions = about["report"].pop("versions")
    report = PackageReport(**{kind: tuple(names) for kind, names in about["report"].items()}, versions=versions)
    return report, None if about["categories"] is None else tuple(about["categories"])


def _row(title: str, text: str) -> str:
    return fill(text or "-", 110, initial_indent=title.ljust(14), subsequent_indent=" " * 14, break_long_words=False)


if TYPE_CHECKING:
    from torch.package.package_exporter import PackageExporter, PackagingError

    Callback: TypeAlias = Callable[[PackageExporter, str], object]

Patterns: TypeAlias = "str | Sequence[str]"

_OUTSIDE = ("torchvision.**", "numpy.**", "PIL.**")  # unless the user's patterns say otherwise


def write(
    file: IO[bytes],
    model: nn.Module,
    labels: list[str] | None,
    patterns: Mapping[str, Patterns],
    callbacks: Mapping[str, Callback | None],
) -> None:
    """Write the archive.

    Args:
        file: where it goes; it is not closed.
        model: what goes in, with its code.
        labels: the labels of its classes.
        patterns: for "mock", "extern" and "intern", in this order of precedence, the names of modules.
        callbacks: for each of them, what is called for every such module.

    Raises:
        HookError: see `export_package`.
    """
    from torch.package.package_exporter import EmptyMatchError, PackageExporter, PackagingError

    linecache.checkcache()  # torch.package reads sources through this cache, which may hold an older version
    sink = _Sink(file)
    try:
        with quiet(), PackageExporter(cast("IO[bytes]", sink)) as exporter:
            register = _Reporter(exporter, labels).register
            for kind, callback in callbacks.items():
                if callback is not None:
                    register[kind](_told(kind, callback))
            _choose(exporter, patterns)
            _save(exporter, model)
            # The last to be saved is the last that the hooks see; they then know all that is to be reported.
            exporter.save_source_string(HOME, "", is_package=True)
    except EmptyMatchError as error:
        pattern = str(error).partition("include=")[2].partition(", exclude=")[0]
        raise HookError(
            f"intern, extern and mock must match modules that the model's code imports, but {pattern!r} decides about "
            "none; correct it or leave it out (torch and the standard library always stay out)"
        ) from None
    except PackagingError as error:
        raise _unpackageable(error) from None
    sink.check()


class _Sink:
    """A file whose errors wait to be asked for: torch ends the whole process where one comes while it writes."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._error: BaseException | None = None

    def write(self, data: bytes) -> None:
        try:
            if self._error is None:
                self._file.write(data)
        except BaseException as error:  # an interruption is no better
            self._error = error

    def flush(self) -> None:
        """Do nothing: what is buffered is written when the file is closed."""

    def check(self) -> None:
        """Raise the first error that came."""
        if self._error is not None:
            raise self._error


class _Reporter:
    """The three hooks: they note what becomes of each module, and write it down when the last has come."""

    def __init__(self, exporter: PackageExporter, labels: list[str] | None) -> None:
        self._labels = labels
        self._interned: list[str] = []
        self._externed: list[str] = []
        self._mocked: list[str] = []
        self.register = {
            "intern": exporter.register_intern_hook,
            "extern": exporter.register_extern_hook,
            "mock": exporter.register_mock_hook,
        }
        self.register["intern"](self._intern)
        self.register["extern"](lambda exporter, name: self._externed.append(name))
        self.register["mock"](lambda exporter, name: self._mocked.append(name))

    def _intern(self, exporter: PackageExporter, name: str) -> None:
        if name == HOME:
            about = {"report": asdict(self._report()), "categories": self._labels}
            exporter.save_text(HOME, "about.json", json.dumps(about, indent=2))
        elif not name.startswith("<"):  # which would be the pickled model
            _check_source(exporter, name)
            self._interned.append(name)

    def _report(self) -> PackageReport:
        versions = {"explain": __version__, "torch": torch.__version__, "python": platform.python_version()}
        interned, externed, mocked = (tuple(sorted(names)) for names in (self._interned, self._externed, self._mocked))
        return PackageReport(interned, externed, mocked, versions)


def _told(kind: str, callback: Callback) -> Callable[[PackageExporter, str], None]:
    """Return the user's own hook, named when it fails, and called for the model's modules only."""
    site = site_of(callback, "the modules of the archive", kind, ("exporter", "name"))

    def told(exporter: PackageExporter, name: str) -> None:
        if name == HOME or name.startswith("<"):  # our own, and the pickled model
            return
        known = len(exporter.dependency_graph.nodes)
        call(site, callback, exporter, name)
        if len(exporter.dependency_graph.nodes) != known:
            raise HookError(
                f"{site} must not add modules or pickles to the archive, but did so at {name!r}; add resources with "
                "exporter.save_text or exporter.save_binary"
            )

    return told


def _choose(exporter: PackageExporter, patterns: Mapping[str, Patterns]) -> None:
    exporter.deny("__main__")  # to import a script's code would be to run the script
    exporter.extern(["sys", "io"])  # what torch.package does by itself with torch and the rest of the standard library
    for kind, given in patterns.items():
        for pattern in [given] if isinstance(given, str) else given:
            try:
                getattr(exporter, kind)(pattern, allow_empty=False)
            except (ValueError, TypeError) as error:
                raise HookError(
                    f"{kind} must hold names or patterns such as 'package.**', got {pattern!r} ({error}); correct it"
                ) from None
    exporter.extern(_OUTSIDE)
    exporter.intern("**")


def _save(exporter: PackageExporter, model: nn.Module) -> None:
    try:
        exporter.save_pickle(HOME, "model.pkl", model)
    except Exception as error:  # what pickle raises depends on what it is that it cannot save
        raise HookError(
            f"model must be one that pickle can save, but that {raised(error)}; define its classes and functions at "
            "the top level of a module, and keep lambdas, locks and open files out of its attributes"
        ) from error


def _check_source(exporter: PackageExporter, name: str) -> None:
    """Refuse a module whose source file has gone: torch.package would take it for an empty one."""
    if exporter.dependency_graph.nodes[name]["source"]:
        return
    file = str(exporter.importer.import_module(name).__file__)
    if not os.path.exists(file):
        raise HookError(_cannot(name, f"its source {file!r} is gone", "put the file back"))


def _unpackageable(error: PackagingError) -> HookError:
    broken = {name: node for name, node in error.dependency_graph.nodes.items() if "error" in node}
    name, node = next(iter(broken.items()))
    family = f"{name.partition('.')[0]}.**"
    outside = f"pass extern={family!r} if it is installed where the archive is opened, or mock= if it is not needed"
    reasons = {
        "DENIED": ("it is the main script", "move the model's code into a module and import it from there"),
        "MOCKED_BUT_STILL_USED": ("the model holds objects of it", "leave it out of mock"),
        "IS_EXTENSION_MODULE": ("it is compiled", outside),
        "DEPENDENCY_RESOLUTION_FAILED": (f"its source is not Python ({node.get('error_context')})", outside),
    }
    return HookError(_cannot(name, *reasons.get(node["error"].name, ("it has no source file", outside))))


def _cannot(name: str, reason: str, remedy: str) -> str:
    return f"model must be made of code that can be packaged, but module {name!r} cannot be: {reason}; {remedy}"


@contextmanager
def quiet() -> Iterator[None]:
    """Silence one warning: torch.package is written with storages that torch deprecates, which no caller can help."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        yield
