"""A model in one archive, with the code that it is made of, its labels, and a report of what went
in.

The report is written by the hooks of ``torch.package``, which tell what became of every module of
code.
"""

import io
import json
import linecache
import os
import platform
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from explain._utils.errors import HookError, ModelError, quiet, raised
from explain._utils.version import __version__
from explain.data.files import write_file
from explain.data.opening import open_for_reading
from explain.hooks.guard import Hook

if TYPE_CHECKING:
    from torch.package.package_exporter import PackageExporter, PackagingError

    Callback: TypeAlias = Callable[[PackageExporter, str], object]

Patterns: TypeAlias = str | Sequence[str]
_OUTSIDE = ("torchvision.**", "numpy.**", "PIL.**")  # unless the user's patterns say otherwise
HOME = "explain_archive"  # the package within the archive that holds all that is not code


@dataclass(frozen=True)
class PackageReport:
    """What became of each module of code: ``interned`` is in the archive, ``externed`` must be
    installed where it is opened, ``mocked`` raises when it is used. ``versions`` is what wrote the
    archive.
    """

    interned: tuple[str, ...]
    externed: tuple[str, ...]
    mocked: tuple[str, ...]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        """The report as lines of text: for each kind how many modules there are and their names,
        and last the versions that wrote the archive."""
        kinds = {"interned": self.interned, "externed": self.externed, "mocked": self.mocked}
        lines = [
            _row(f"{kind:<8} {len(names):>3}", ", ".join(names)) for kind, names in kinds.items()
        ]
        return "\n".join([*lines, _row("written by", self.writers())])

    def writers(self) -> str:
        """Return the names and versions of what wrote the archive."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())


# State dict hooks are not among them: networks register those on themselves, and they do nothing in
# a pass.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@dataclass(frozen=True, eq=False)
class Packaged:
    """What `import_package` found: the model, on the CPU and with the training flags that it had,
    and its labels."""

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
    on_intern: "Callback | None" = None,
    on_extern: "Callback | None" = None,
    on_mock: "Callback | None" = None,
    overwrite: bool = False,
) -> PackageReport:
    """Write a model with its weights, the source of its classes and its labels to one
    ``torch.package`` archive.

    Python, torch, torchvision, NumPy and Pillow stay out; the source of every other module that the
    model is made of, or that this source imports, goes in. Patterns such as ``"package.module"`` or
    ``"package.**"`` change that, except for torch and Python itself: ``mock`` is looked at first,
    then ``extern``, then ``intern``.

    Args:
        model: a module whose classes are defined in modules, on any device; it is left as it is.
        path: the file to write; it appears complete or not at all.
        categories: the labels of the model's classes.
        intern: modules whose source goes in.
        extern: modules that stay out and must be installed where the archive is opened.
        mock: modules that the code imports but the model does not need; to use one raises
            ``NotImplementedError``.
        on_intern: called as ``on_intern(exporter, name)`` for each module whose source goes in,
            just before it does; ``exporter`` is the ``torch.package.PackageExporter``. It may add
            resources (``exporter.save_text``, ``exporter.save_binary``), but no modules or pickles.
            What it raises ends the export.
        on_extern: the same for each module that stays out.
        on_mock: the same for each module that is mocked.
        overwrite: replace a file that is there already.

    Returns:
        What went in, what stayed out and what was mocked, as it is noted in the archive.

    Raises:
        HookError: the model has hooks on it or cannot be packaged, a pattern matches none of its
            modules, or a callback raised.
        OutputError: the file cannot be written, or is there already.

    See https://docs.pytorch.org/docs/stable/package.html for how code is found and kept apart.

    >>> from explain.models.small_networks import SmallResNet
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     report = export_package(SmallResNet(2, 4, (8,), (1,)), Path(folder, "model.pt"))
    >>> report.interned, "torch" in report.externed, report.mocked
    (('explain.models.small_networks',), True, ())
    >>> with TemporaryDirectory() as folder:
    ...     tell = lambda exporter, name: print(f"{name} goes in")
    ...     report = export_package(
    ...         SmallResNet(2, 4, (8,), (1,)), Path(folder, "model.pt"), on_intern=tell
    ...     )
    explain.models.small_networks goes in
    """
    _check_model(model)
    labels = _labels(categories)
    callbacks = {"mock": on_mock, "extern": on_extern, "intern": on_intern}
    archive, report = _written(
        model, labels, {"mock": mock, "extern": extern, "intern": intern}, callbacks
    )
    write_file(path, archive, overwrite=overwrite)
    return report


def import_package(path: str | os.PathLike[str]) -> Packaged:
    """Open an archive of `export_package`: its code comes from the archive, not from what is
    installed here.

    **This runs the code in the archive**: open only what comes from someone you trust.

    Args:
        path: the archive.

    Raises:
        ModelError: it is damaged, no such archive, or needs code that is not installed.

    See https://docs.pytorch.org/docs/stable/package.html for how code from an archive is run.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     report = export_package(
    ...         nn.Linear(3, 2), Path(folder, "model.pt"), categories=["cat", "dog"]
    ...     )
    ...     packaged = import_package(Path(folder, "model.pt"))
    >>> packaged.model, packaged.categories, packaged.report == report
    (Linear(in_features=3, out_features=2, bias=True), ('cat', 'dog'), True)
    """
    from torch.package.package_importer import PackageImporter

    _check_archive(path)
    try:
        importer = PackageImporter(str(path))
        contents = json.loads(importer.load_text(HOME, "about.json"))
    except (RuntimeError, ImportError, ValueError):
        raise ModelError(
            f"path must be an archive of export_package, got {str(path)!r}, which is another"
        ) from None
    report = _report_of(contents["report"])
    try:
        # torch.package is written with storages that torch deprecates, which no caller can help
        with quiet():
            model = importer.load_pickle(HOME, "model.pkl", map_location="cpu")
    except ImportError as error:
        raise ModelError(
            f"path {str(path)!r} needs code that is not installed here ({error}); install it "
            f"(the archive is by {report.writers()}), or export the model with it interned"
        ) from error
    categories = contents["categories"]
    return Packaged(model, None if categories is None else tuple(categories), report)


def _report_of(values: Mapping[str, Any]) -> PackageReport:
    """Return the report as an object, from its JSON in an archive or from what `_noted` filled."""
    interned = tuple(values["interned"])
    externed = tuple(values["externed"])
    return PackageReport(interned, externed, tuple(values["mocked"]), values["versions"])


def _check_archive(path: str | os.PathLike[str]) -> None:
    """Refuse an archive whose file is damaged or no ZIP archive, before torch reads it.
    The reader of torch compares no checksums, so that weights could change unnoticed.
    """
    try:
        with open_for_reading(Path(path)) as file, zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
    except (OSError, EOFError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(
            f"path must be an archive that export_package wrote, got {str(path)!r}: {reason}"
        ) from None
    if damaged is not None:
        raise ModelError(f"path {str(path)!r} is damaged (at {damaged}); copy or export it again")


def _check_model(model: nn.Module) -> None:
    """Refuse a model that must not be packaged: one with hooks on its modules or parameters, which
    would be pickled into the archive, or with modules out of another archive.
    """
    from torch.package.analyze.is_from_package import is_from_package

    if not isinstance(model, nn.Module):
        raise HookError(
            f"model must be an nn.Module, got {type(model).__name__}; give the module itself"
        )
    for name, module in model.named_modules():
        where = f"layer {name!r}" if name else "the model itself"
        hooks = [getattr(module, kind) for kind in _HOOKS]
        for parameter in module.parameters(recurse=False):
            hooks += [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
        count = sum(map(len, hooks))
        if count:
            raise HookError(
                f"model must have no hooks when it is packaged, got {count} on {where}; remove "
                "them before"
            )
        if is_from_package(module):
            raise HookError(
                f"model must not come out of an archive itself, but {where} does; copy that archive"
            )


def _labels(categories: Sequence[str] | None) -> list[str] | None:
    """Return the labels of the model's classes as a list for the JSON in the archive; None where
    there are none.
    """
    if categories is None:
        return None
    labels = list(categories)
    if isinstance(categories, str) or not all(isinstance(label, str) for label in labels):
        raise HookError(
            f"categories must be a sequence of labels, got {categories!r:.60}; give a string for "
            "each class"
        )
    return labels


def _row(title: str, text: str) -> str:
    """A line of the text of a `PackageReport`: its title in 14 columns, and the text beside it, "-"
    for none, wrapped at 110 columns."""
    return fill(
        text or "-",
        110,
        initial_indent=title.ljust(14),
        subsequent_indent=" " * 14,
        break_long_words=False,
    )


def _written(
    model: nn.Module,
    labels: list[str] | None,
    patterns: dict[str, Patterns],
    callbacks: "dict[str, Callback | None]",
) -> tuple[bytes, PackageReport]:
    """The bytes of the model's archive and its report; "mock", "extern", "intern" in this
    precedence. The order matters: hooks, patterns, the model, and last `HOME`.
    """
    from torch.package.package_exporter import EmptyMatchError, PackageExporter, PackagingError

    # torch.package reads sources through this cache, which may hold an older version
    linecache.checkcache()
    buffer = io.BytesIO()
    try:
        with quiet(), PackageExporter(buffer) as exporter:
            report_values = _noted(exporter, labels)
            for kind, callback in callbacks.items():
                if callback is not None:
                    getattr(exporter, f"register_{kind}_hook")(_guarded(kind, callback))
            _choose(exporter, patterns)
            try:
                exporter.save_pickle(HOME, "model.pkl", model)
            # what pickle raises depends on what it is that it cannot save
            except Exception as error:
                raise HookError(
                    f"model must be one that pickle saves, but that {raised(error)}; keep "
                    "local classes, lambdas, locks and open files out of it"
                ) from error
            # The last to be saved is the last that the hooks see; they then know all that is to be
            # reported.
            exporter.save_source_string(HOME, "", is_package=True)
    except EmptyMatchError as error:
        # only its message has the pattern: "... include=PATTERN, exclude=..."
        pattern = str(error).partition("include=")[2].partition(", exclude=")[0]
        raise HookError(
            f"patterns must match modules that the model imports, got {pattern!r}; leave it out"
        ) from None
    except PackagingError as error:
        raise _unpackageable(error) from None
    return buffer.getvalue(), _report_of(report_values)


def _noted(exporter: "PackageExporter", labels: list[str] | None) -> dict[str, Any]:
    """Note what becomes of each module, in a dictionary that fills while the exporter saves. At
    `HOME`, the last, it is written with the labels as ``about.json``.
    """
    versions = {
        "explain": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    report: dict[str, Any] = {"interned": [], "externed": [], "mocked": [], "versions": versions}

    def intern(exporter: "PackageExporter", name: str) -> None:
        """Note a module whose source goes into the archive; at `HOME`, the last one, write the
        report."""
        if name == HOME:
            for kind in ("interned", "externed", "mocked"):
                report[kind].sort()
            exporter.save_text(
                HOME, "about.json", json.dumps({"report": report, "categories": labels}, indent=2)
            )
        elif not name.startswith("<"):  # which would be the pickled model
            report["interned"].append(name)

    exporter.register_intern_hook(intern)
    exporter.register_extern_hook(lambda exporter, name: report["externed"].append(name))
    exporter.register_mock_hook(lambda exporter, name: report["mocked"].append(name))
    return report


def _guarded(kind: str, callback: "Callback") -> "Callable[[PackageExporter, str], None]":
    """A caller's callback as a hook of ``torch.package``, for the model's modules only, and named
    (``kind`` "intern", "extern" or "mock") when it raises.
    """
    hook = Hook(callback, "the modules of the archive", kind)
    hook.must_take(["exporter", "name"])

    def guarded(exporter: "PackageExporter", name: str) -> None:
        if name != HOME and not name.startswith("<"):  # our own, and the pickled model
            hook(exporter, name)

    return guarded


def _choose(exporter: "PackageExporter", patterns: Mapping[str, Patterns]) -> None:
    """Give the exporter the patterns, the caller's before the defaults, as the first match counts;
    it raises when closed if one of the caller's matches nothing.
    """
    exporter.deny("__main__")  # to import a script's code would be to run the script
    # what torch.package does by itself with torch and the rest of the standard library
    exporter.extern(["sys", "io"])
    for kind, patterns_of_kind in patterns.items():
        if isinstance(patterns_of_kind, str):
            patterns_of_kind = [patterns_of_kind]
        for pattern in patterns_of_kind:
            try:
                getattr(exporter, kind)(pattern, allow_empty=False)
            except (ValueError, TypeError):
                raise HookError(
                    f"{kind} must hold patterns like 'package.**', got {pattern!r}; correct it"
                ) from None
    exporter.extern(_OUTSIDE)
    exporter.intern("**")


def _unpackageable(error: "PackagingError") -> HookError:
    """Return an error of one line that names the first module that ``torch.package`` could not
    package, and the remedy; its own message is a list of many lines."""
    nodes = error.dependency_graph.nodes.items()
    name, node = next((name, node) for name, node in nodes if "error" in node)
    reason = " ".join(f"{node['error'].value} {node.get('error_context') or ''}".split())
    return HookError(
        f"model must be made of code that can be packaged, but module {name!r} cannot be: "
        f"{reason}; move a script's classes into a module, or pass extern= if it is installed "
        "elsewhere, mock= if it is not used"
    )
