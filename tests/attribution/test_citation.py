"""Where methods come from, as BibTeX and as CITATION.cff have it."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

import pytest

import explain
from explain import MethodError
from explain.methods import Augmented, GradCAM, Smooth, list_methods
from explain.methods.base import get_method
from tests.conftest import ROOT

NEEDED = {
    "inproceedings": {"author", "title", "booktitle", "year"},
    "article": {"author", "title", "journal", "year"},
    "misc": {"author", "title", "howpublished", "year"},
}


def parsed(text: str) -> dict[str, dict[str, str]]:
    """Entries of BibTeX by their key, each with its fields and its type."""
    entries = {}
    for kind, key, body in re.findall(r"^@(\w+)\{([^\s,{}]+),\n(.*?)\n\}$", text, re.M | re.S):
        assert key not in entries
        entries[key] = dict(re.findall(r"^\s*(\w+)\s*= \{(.*)\},?$", body, re.M), type=kind)
        assert body.count("{") == body.count("}")
    assert len(entries) == text.count("@")
    return entries


@pytest.mark.parametrize("name", list_methods())
def test_every_method_says_where_it_comes_from(name: str) -> None:
    method = get_method(name)
    entries = parsed(explain.cite(name))
    source = method.source  # type: ignore[attr-defined]
    own = entries[source.key]
    assert set(own) >= NEEDED[own["type"]]
    # {\v S} is S
    first = re.sub(r"\{\\[^a-zA-Z]?\w?\s*\{?(\w)\}?\}", r"\1", own["author"].split(",")[0]).strip(
        "{}"
    )
    plain = unicodedata.normalize("NFKD", method.paper).encode("ascii", "ignore").decode()
    assert first in plain, "the source is another than the paper"
    assert own["year"] in method.paper
    assert own["title"] == f"{{{source.title}}}"
    assert explain.cite(name).isascii()


def test_methods_within_methods_are_cited_once_each() -> None:
    assert list(parsed(explain.cite("gradcam"))) == ["selvaraju2017gradcam"]
    assert list(parsed(explain.cite("smooth(layercam)"))) == [
        "smilkov2017smoothgrad",
        "jiang2021layercam",
    ]
    several = explain.cite(Augmented(Smooth("gradcam", statistic="variance")), "gradcam", "cam")  # type: ignore[arg-type]
    assert list(parsed(several)) == [
        "gildenblat2021pytorchgradcam",
        "adebayo2018sanity",
        "selvaraju2017gradcam",
        "zhou2016cam",
    ]


@dataclass(frozen=True)
class OfNobody(GradCAM):
    name: str = "ofnobody"  # type: ignore[misc]
    source: None = None  # type: ignore[assignment]


def test_what_cannot_be_cited_is_refused() -> None:
    with pytest.raises(MethodError, match="did you mean 'gradcam'"):
        explain.cite("gradcan")
    with pytest.raises(MethodError, match="source of ofnobody must"):
        explain.cite("cam", Smooth(OfNobody()))


def test_the_package_is_cited_as_its_citation_file_says() -> None:
    (entry,) = parsed(explain.cite()).values()
    lines = (ROOT / "CITATION.cff").read_text("utf-8")
    told = dict(re.findall(r'^(?:  - )?([\w-]+): "?(.*?)"?$', lines, re.M))
    assert told["version"] == explain.__version__
    assert entry["title"] == f"{{{told['title']}, version {told['version']}}}"
    assert entry["author"] == f"{{{told['name']}}}"
