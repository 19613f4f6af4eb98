"""The papers and programs that methods come from; those of the methods here are in ``bibliography.bib``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Literal

from explain._utils.errors import MethodError, shown

Kind = Literal["inproceedings", "article", "misc"]
_VENUE = {"inproceedings": "booktitle", "article": "journal", "misc": "howpublished"}


@dataclass(frozen=True)
class Source:
    r"""A paper or a program, and how to cite it.

    Args:
        key: what the entry is called, such as ``selvaraju2017gradcam``.
        authors: "Family, Given and Family, Given", as in BibTeX.
        title: as printed; its capitals are kept.
        year: of publication.
        venue: the conference, the journal, or where a preprint or program is found.
        kind: of the entry: a conference paper, an article in a journal, or something else.
        doi, arxiv: its numbers there, where it has some.
        shorthand: authors, venue and year, as in lists of methods.

    Raises:
        MethodError: the key, the authors or a brace would make no BibTeX entry.

    >>> print(Source("doe2020maps", "Doe, Jane", "Maps of Everything", 2020, "Journal of Maps", "article").bibtex())
    @article{doe2020maps,
      author = {Doe, Jane},
      title = {{Maps of Everything}},
      journal = {Journal of Maps},
      year = {2020},
    }
    """

    key: str
    authors: str
    title: str
    year: int
    venue: str = ""
    kind: Kind = "inproceedings"
    doi: str = ""
    arxiv: str = ""
    shorthand: str = ""

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9:_.+-]+", self.key):
            raise MethodError(f"key of a source must be letters, digits and :_.+-, got {shown(self.key)}; change it")
        if self.kind not in _VENUE:
            raise MethodError(f"kind of a source must be one of {', '.join(_VENUE)}, got {shown(self.kind)}; take one")
        for field in (self.authors, self.title):
            if not field or field.count("{") != field.count("}"):
                raise MethodError(
                    f"authors and title of a source must be texts with as many {{ as }}, got {shown(field)}; change it"
                )

    def bibtex(self) -> str:
        """Return the BibTeX entry."""
        fields = {
            "author": self.authors,
            "title": f"{{{self.title}}}",
            _VENUE[self.kind]: self.venue,
            "year": str(self.year),
            "doi": self.doi,
            **({"eprint": self.arxiv, "archiveprefix": "arXiv"} if self.arxiv else {}),
        }
        lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items() if value)
        return f"@{self.kind}{{{self.key},\n{lines}}}"


@cache
def _bibliography() -> dict[str, Source]:
    """The sources of all methods here, by key, from ``bibliography.bib``."""
    text = resources.files("explain.methods").joinpath("bibliography.bib").read_text("utf-8")
    found = {}
    for kind, key, body in re.findall(r"@(\w+)\{([^,]+),\n(.*?)\n\}", text, re.DOTALL):
        entry = dict(re.findall(r"^  (\w+) = \{(.*)\},$", body, re.MULTILINE))
        title, year, venue = entry["title"].strip("{}"), int(entry["year"]), entry[_VENUE[kind]]
        doi, arxiv = entry.get("doi", ""), entry.get("eprint", "")
        found[key] = Source(key, entry["author"], title, year, venue, kind, doi, arxiv, entry["shorthand"])
    return found


def cited(key: str) -> Source:
    """The source with this key in ``bibliography.bib``.

    >>> cited("selvaraju2017gradcam").shorthand
    'Selvaraju et al., ICCV 2017'
    """
    return _bibliography()[key]
