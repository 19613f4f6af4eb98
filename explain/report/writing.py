"""Pages as files."""

from __future__ import annotations

import os
from pathlib import Path

from explain.output import Files


def written(text: str, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a page, complete or not at all, and return its path.

    Raises:
        OutputError: the file is there already and ``overwrite`` is not set, or it cannot be written.
    """
    place = Path(path)
    files = Files(place.parent, overwrite=overwrite)
    files.add_text(place.name, text)
    return files.write()[0]
