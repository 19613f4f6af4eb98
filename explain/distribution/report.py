"""What became of each module of code when a model was packed, as the archive itself records it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import fill
from typing import TYPE_CHECKING

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
