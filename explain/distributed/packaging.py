"""A model in one archive, with the code that it is made of, its labels, and a report of what went in.

The report is written by the hooks of ``torch.package``, which tell what became of every module of code.
"""

from __future__ import annotations

import os
import secrets
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from explain._utils.errors import ExplainError, HookError, ModelError, OutputError, raised
from explain.data.images import opened
from explain.distributed.exporting import HOME, PackageReport, Patterns, about_of, quiet, write

if TYPE_CHECKING:
    from explain.distributed.exporting import Callback

# State dict hooks are not among them: networks register those on themselves, and they do nothing in a pass.
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


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
    on_intern: Callback | None = None,
    on_extern: Callback | None = None,
    on_mock: Callback | None = None,
    overwrite: bool = False,
) -> PackageReport:
    """Write a model with its weights, the source of its classes and its labels to one ``torch.package`` archive.

    Python, torch, torchvision, NumPy and Pillow stay out; the source of every other module that the model is made of,
    or that this source imports, goes in. Patterns such as ``"package.module"`` or ``"package.**"`` change that, except
    for torch and Python itself: ``mock`` is looked at first, then ``extern``, then ``intern``.

    Args:
        model: a module whose classes are defined in modules, on any device; it is left as it is.
        path: the file to write; it appears complete or not at all.
        categories: the labels of the model's classes.
        intern: modules whose source goes in.
        extern: modules that stay out and must be installed where the archive is opened.
        mock: modules that the code imports but the model does not need; to use one raises ``NotImplementedError``.
        on_intern: called as ``on_intern(exporter, name)`` for each module whose source goes in, just before it does;
            ``exporter`` is the ``torch.package.PackageExporter``. It may add resources (``exporter.save_text``,
            ``exporter.save_binary``), but no modules or pickles. What it raises ends the export.
        on_extern: the same for each module that stays out.
        on_mock: the same for each module that is mocked.
        overwrite: replace a file that is there already.

    Returns:
        What went in, what stayed out and what was mocked, as it is noted in the archive.

    Raises:
        HookError: the model has hooks on it or cannot be packaged, a pattern matches none of its modules, or a
            callback raised.
        OutputError: the file cannot be written, or is there already.

    See https://docs.pytorch.org/docs/stable/package.html for how code is found and kept apart.

    >>> from explain.models.small_resnet import SmallResNet
    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     report = export_package(SmallResNet(2, 4, (8,), (1,)), Path(folder, "model.pt"))
    >>> report.interned, "torch" in report.externed, report.mocked
    (('explain.models.small_resnet',), True, ())
    >>> with TemporaryDirectory() as folder:
    ...     tell = lambda exporter, name: print(f"{name} goes in")
    ...     report = export_package(SmallResNet(2, 4, (8,), (1,)), Path(folder, "model.pt"), on_intern=tell)
    explain.models.small_resnet goes in
    """
    target = _target(path, overwrite)
    _check_model(model)
    labels = _labels(categories)
    callbacks = {"mock": on_mock, "extern": on_extern, "intern": on_intern}
    part = target.with_name(f".explain-{secrets.token_hex(8)}.part")  # which cannot be guessed
    try:
        with part.open("xb") as file:  # and which nothing had before: no link is followed
            write(file, model, labels, {"mock": mock, "extern": extern, "intern": intern}, callbacks)
        report = _reread(part)
        _place(part, target, overwrite)
    except OSError as error:
        reason = error.strerror or error
        raise OutputError(f"path {str(path)!r} cannot be written: {reason}; choose another place") from None
    finally:
        with suppress(OSError):  # no file was there to be removed
            part.unlink()
    return report


def import_package(path: str | os.PathLike[str]) -> Packaged:
    """Open an archive of `export_package`: its code comes from the archive, not from what is installed here.

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
        report, categories = about_of(importer)
    except ExplainError:
        raise
    except (RuntimeError, ImportError, ValueError, TypeError, KeyError):
        raise ModelError(
            f"path must be an archive that export_package wrote, got {str(path)!r}, which holds other things"
        ) from None
    try:
        with quiet():
            model = importer.load_pickle(HOME, "model.pkl", map_location="cpu")
    except ImportError as error:
        missing = f"module {error.name!r}" if isinstance(error, ModuleNotFoundError) else raised(error)
        raise ModelError(
            f"path {str(path)!r} needs code that is not installed here ({missing}); install it (the archive was "
            f"written by {report.writers()}), or export the model with it interned"
        ) from error
    return Packaged(model, categories, report)


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
        raise _taken(target)
    return target


def _taken(target: Path) -> OutputError:
    return OutputError(f"path {str(target)!r} exists already; choose another, or pass overwrite=True")


def _place(part: Path, target: Path, overwrite: bool) -> None:
    """Give the whole file its name; without permission to overwrite, only if the name is still free."""
    if not overwrite:
        try:
            os.link(part, target)  # a second name, since this never replaces another file
            return
        except FileExistsError:
            raise _taken(target) from None
        except OSError:  # a file system without second names
            if os.path.lexists(target):
                raise _taken(target) from None
    os.replace(part, target)


# What comes out


def _reread(part: Path) -> PackageReport:
    """Return the report of an archive that has just been written: what cannot be opened is not given out."""
    from torch.package.package_importer import PackageImporter

    try:
        with part.open("rb") as file:
            return about_of(PackageImporter(file))[0]
    except ImportError as error:
        raise HookError(
            "intern, extern and mock must treat a package and what is in it alike, but the archive has an "
            f"{error}; end the patterns in '.**'"
        ) from None


def _check_archive(path: str | os.PathLike[str]) -> None:
    """Refuse a damaged file: the reader of torch compares no checksums, so weights could change unnoticed."""
    try:
        with opened(Path(path)) as file, zipfile.ZipFile(file) as archive:
            size = os.fstat(file.fileno()).st_size
            if sum(each.file_size for each in archive.infolist()) > size:  # torch compresses nothing
                raise zipfile.BadZipFile("it would become larger when it is unpacked")
            damaged = archive.testzip()
    except (OSError, EOFError, NotImplementedError, RuntimeError, zlib.error, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or error
        raise ModelError(f"path must be an archive that export_package wrote, got {str(path)!r}: {reason}") from None
    if damaged is not None:
        raise ModelError(f"path {str(path)!r} is damaged (at {damaged}); copy or export it again")
