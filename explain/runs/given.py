"""What was given as a source, as a `Source`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from explain.errors import RunError, either, shown
from explain.images import EXTENSIONS
from explain.runs.datasets import Columns, DataSet, HuggingFace, Photos
from explain.runs.lists import ENDINGS, PhotoList
from explain.runs.shards import Shards, shard_names
from explain.runs.sources import Folder, Source, must_exist, text


def source_of(given: Any) -> Source:
    """Return the source that something stands for.

    Args:
        given: a folder of photos, of class folders or of shards; a list of photos in a file (``.csv``, ``.tsv``,
            ``.json``, ``.jsonl``); a shard (``.tar``), a range of shards ("train-{000..009}.tar") or a pattern; a
            photo; a data set of PyTorch or Hugging Face; a list or iterator of photos; or a `Source`.

    Raises:
        RunError: it is none of these, or is not there.

    >>> source_of([b"one photo", b"another"]).count
    2
    """
    if isinstance(given, Source):
        return given
    if isinstance(given, (str, os.PathLike)):
        return _of_name(given)
    if isinstance(given, Mapping):
        raise RunError(f"source must be one split of a data set, got several: {', '.join(map(str, given))}; choose one")
    if hasattr(given, "features") and hasattr(given, "column_names"):
        if hasattr(given, "__len__"):
            return HuggingFace(given)
        return Photos(given, Columns.of(given.features) if given.features else None)  # it only streams
    if isinstance(given, (list, tuple)):
        return Photos(given)
    if hasattr(given, "__getitem__") and hasattr(given, "__len__") and not isinstance(given, bytes):
        return DataSet(given)
    if isinstance(given, Iterable) and not isinstance(given, bytes):
        return Photos(given)
    raise RunError(f"source must be a folder, a list of photos or a data set, got {shown(given)}; see explain.run")


def _of_name(name: str | os.PathLike[str]) -> Source:
    plain = os.fspath(name)
    if os.path.isdir(plain):
        shards = sorted(path for path in Path(plain).iterdir() if path.suffix == ".tar" and path.is_file())
        folder = Folder(plain)
        return Shards(shards) if shards and not folder.count else folder
    spelt = shard_names(plain)
    if spelt is not None and not os.path.exists(plain):
        if not spelt:
            raise RunError(f"source {text(plain)!r} must be a pattern that some files fit, but none does; check it")
        return Shards(spelt)
    ending = os.path.splitext(plain)[1].lower()
    if ending == ".tar":
        return Shards([plain])
    if ending in ENDINGS:
        return PhotoList(plain)
    must_exist(plain, "a folder, a list, a shard or a photo")
    if ending in EXTENSIONS:
        return Photos([plain])
    known = ", ".join([*ENDINGS, ".tar"])
    got = f"a file {ending}" if ending else "a file without ending"
    remedy = either("give explain.run a folder or a list", "name a folder or a list")
    raise RunError(f"source {text(plain)!r} must be a folder or one of {known}, got {got}; {remedy}")
