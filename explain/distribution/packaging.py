"""A model in one archive, with the code that it is made of, its labels, and a report of what went in.

The report is written by the hooks of ``torch.package``, which tell what became of every module of code.
"""

from __future__ import annotations

import json
import linecache
import os
import platform
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from textwrap import fill
from typing import IO, TYPE_CHECKING, TypeAlias, cast

import torch
from torch import nn

from explain.errors import HookError, ModelError, OutputError, raised
from explain.version import __version__

if TYPE_CHECKING:
    from torch.package.package_exporter import PackageExporter, PackagingError
    from torch.package.package_importer import PackageImporter

Patterns: TypeAlias = "str | Sequence[str]"

_HOME = "explain_archive"  # the package within the archive that holds all that is not code
_OUTSIDE = ("torchvision.**", "numpy.**", "PIL.**")  # unless the user's patterns say otherwise
# State dict hooks are not among them: networks register those on themselves, and they do nothing in a pass.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
        return "\n".join([*lines, _row("written by", self._writers())])

    def _writers(self) -> str:
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())


@dataclass(frozen=True, eq=False)
class Packaged:
    """What `import_package` found: the model, on the CPU and with the training flags that it had, and its labels."""

    model: nn.Module
    categories: tuple[str, ...] | None
    report: PackageReport


def export_package(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    categories: Sequence[str] | None = None,
    intern: Patterns = (),
    extern: Patterns = (),
    mock: Patterns = (),
    overwrite: bool = False,
) -> PackageReport:
    """Write a model with its weights, the source of its classes and its labels to one ``torch.package`` archive.

    Python, torch, torchvision, NumPy and Pillow stay out; the source of every other module that the model is made of,
    or that this source imports, goes in. Patterns such as ``"package.module"`` or ``"package.**"`` change that, except
    for torch and Python itself: ``mock`` is looked at first, then ``extern``, then ``intern``.

    Args:
        model: a module whose classes are defined in modules, on whatever device; it is left as it is.
        path: the file to write; it appears complete or not at all.
        categories: the labels of the model's classes.
        intern: modules whose source goes in.
        extern: modules that stay out and must be installed where the archive is opened.
        mock: modules that the code imports but the model does not need; to use one raises ``NotImplementedError``.
        overwrite: replace a file that is there already.

    Returns:
        What went in, what stayed out and what was mocked, as it is noted in the archive.

    Raises:
        HookError: the model has hooks on it or cannot be packaged, or a pattern matches none of its modules.
        OutputError: the file cannot be written, or is there already.

    See https://docs.pytorch.org/docs/stable/package.html for how code is found and kept apart.

    >>> from explain.models.network import SmallResNet
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     report = export_package(SmallResNet(2, 4, (8,), (1,)), Path(folder, "model.pt"))
    >>> report.interned, "torch" in report.externed, report.mocked
    (('explain.models.network',), True, ())
    """
    target = _target(path, overwrite)
    _check_model(model)
    labels = _labels(categories)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with part.open("wb") as file:
            _write(file, model, labels, {"mock": mock, "extern": extern, "intern": intern})
        report = _reread(part)
        os.replace(part, target)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"path {str(path)!r} cannot be written: {reason}; choose another place") from None
    finally:
        with suppress(OSError):  # no file was there to be removed
            part.unlink()
    return report


def import_package(path: str | os.PathLike[str]) -> Packaged:
    """Open an archive of `export_package`: its code comes out of the archive, whatever is installed here.

    **This runs the code in the archive**: open only what comes from someone you trust.

    Args:
        path: the archive.

    Raises:
        ModelError: it is damaged, no such archive, or needs code that is not installed.

    See https://docs.pytorch.org/docs/stable/package.html for how code from an archive is run.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     report = export_package(nn.Linear(3, 2), Path(folder, "model.pt"), categories=["cat", "dog"])
    ...     packaged = import_package(Path(folder, "model.pt"))
    >>> packaged.model, packaged.categories, packaged.report == report
    (Linear(in_features=3, out_features=2, bias=True), ('cat', 'dog'), True)
    """
    from torch.package.package_importer import PackageImporter

    _check_archive(path)
    try:
        importer = PackageImporter(str(path))
        report, categories = _about(importer)
    except (RuntimeError, ImportError, ValueError, TypeError, KeyError):
        raise ModelError(
            f"path must be an archive that export_package wrote, got {str(path)!r}, which holds other things"
        ) from None
    try:
        with _quiet():
            model = importer.load_pickle(_HOME, "model.pkl", map_location="cpu")
    except ImportError as error:
        missing = f"module {error.name!r}" if isinstance(error, ModuleNotFoundError) else raised(error)
        raise ModelError(
            f"path {str(path)!r} needs code that is not installed here ({missing}); install it (the archive was "
            f"written by {report._writers()}), or export the model with it interned"
        ) from error
    return Packaged(model, categories, report)


# What goes in


def _write(file: IO[bytes], model: nn.Module, labels: list[str] | None, patterns: Mapping[str, Patterns]) -> None:
    from torch.package.package_exporter import EmptyMatchError, PackageExporter, PackagingError

    linecache.checkcache()  # torch.package reads sources through this cache, which may hold an older version
    sink = _Sink(file)
    try:
        with _quiet(), PackageExporter(cast("IO[bytes]", sink)) as exporter:
            _Reporter(exporter, labels)
            _choose(exporter, patterns)
            _save(exporter, model)
            # The last to be saved is the last to be told to the hooks, which then know all there is to report.
            exporter.save_source_string(_HOME, "", is_package=True)
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
        exporter.register_intern_hook(self._intern)
        exporter.register_extern_hook(lambda exporter, name: self._externed.append(name))
        exporter.register_mock_hook(lambda exporter, name: self._mocked.append(name))

    def _intern(self, exporter: PackageExporter, name: str) -> None:
        if name == _HOME:
            about = {"report": asdict(self._report()), "categories": self._labels}
            exporter.save_text(_HOME, "about.json", json.dumps(about, indent=2))
        elif not name.startswith("<"):  # which would be the pickled model
            _check_source(exporter, name)
            self._interned.append(name)

    def _report(self) -> PackageReport:
        versions = {"explain": __version__, "torch": torch.__version__, "python": platform.python_version()}
        interned, externed, mocked = (tuple(sorted(names)) for names in (self._interned, self._externed, self._mocked))
        return PackageReport(interned, externed, mocked, versions)


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
        exporter.save_pickle(_HOME, "model.pkl", model)
    except Exception as error:  # what pickle raises depends on what it is that it cannot save
        raise HookError(
            f"model must be one that pickle can save, but that {raised(error)}; define its classes and functions at "
            "the top level of a module, and keep lambdas, locks and open files out of its attributes"
        ) from error


# What cannot go in


def _check_model(model: nn.Module) -> None:
    from torch.package.analyze.is_from_package import is_from_package

    if not isinstance(model, nn.Module):
        raise HookError(f"model must be an nn.Module, got {type(model).__name__}; give the module itself")
    for name, module in model.named_modules():
        where = f"layer {name!r}" if name else "the model itself"
        if count := _hooks_on(module):
            raise HookError(
                f"model must have no hooks on it when it is packaged, got {count} on {where}; remove them, and "
                "register them again on what import_package returns"
            )
        if is_from_package(module):
            raise HookError(f"model must not come out of an archive itself, but {where} does; copy that archive")


def _hooks_on(module: nn.Module) -> int:
    parameters = module.parameters(recurse=False)
    on_parameters = [hooks for p in parameters for hooks in (p._backward_hooks, p._post_accumulate_grad_hooks) if hooks]
    return sum(map(len, [*on_parameters, *(getattr(module, kind) for kind in _HOOKS)]))


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


def _labels(categories: Sequence[str] | None) -> list[str] | None:
    if categories is None:
        return None
    wrong = [categories] if isinstance(categories, str) else [c for c in categories if not isinstance(c, str)]
    if wrong:
        raise HookError(f"categories must be a sequence of labels, got {wrong[0]!r}; give a string for each class")
    return list(categories)


def _target(path: str | os.PathLike[str], overwrite: bool) -> Path:
    target = Path(path)
    if not os.path.isdir(target.parent):
        raise OutputError(f"path must be in a folder that exists, got {str(path)!r}; create the folder first")
    if os.path.isdir(target):
        raise OutputError(f"path must be a file, but {str(path)!r} is a folder; add the name of the file")
    if os.path.lexists(target) and not overwrite:
        raise OutputError(f"path {str(path)!r} exists already; choose another, or pass overwrite=True")
    return target


# What comes out


def _reread(part: Path) -> PackageReport:
    """Return the report of an archive that has just been written: what cannot be opened is not given out."""
    from torch.package.package_importer import PackageImporter

    try:
        with part.open("rb") as file:
            return _about(PackageImporter(file))[0]
    except ImportError as error:
        raise HookError(
            "intern, extern and mock must treat a package and what is in it alike, but the archive has an "
            f"{error}; end the patterns in '.**'"
        ) from None


def _about(importer: PackageImporter) -> tuple[PackageReport, tuple[str, ...] | None]:
    about = json.loads(importer.load_text(_HOME, "about.json"))
    versions = about["report"].pop("versions")
    report = PackageReport(**{kind: tuple(names) for kind, names in about["report"].items()}, versions=versions)
    return report, None if about["categories"] is None else tuple(about["categories"])


def _check_archive(path: str | os.PathLike[str]) -> None:
    """Refuse a damaged file: the reader of torch compares no checksums, so weights could change unnoticed."""
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except (OSError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"path must be an archive that export_package wrote, got {str(path)!r}: {reason}") from None
    if damaged is not None:
        raise ModelError(f"path {str(path)!r} is damaged (at {damaged}); copy or export it again")


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence one warning: torch.package is written with storages that torch deprecates, which no caller can help."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        yield


def _row(title: str, text: str) -> str:
    return fill(text or "-", 110, initial_indent=title.ljust(14), subsequent_indent=" " * 14, break_long_words=False)
