"""What a method is: a frozen value with a name, needs, mathematics and a source to cite; methods by
name."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, dataclass_transform

import torch

from explain._utils.errors import ArgumentError, MethodError, keywords, python_or_command, shown
from explain._utils.options import (
    CheckedFields,
    SpecError,
    enter,
    named_in,
    names_like,
    read_written,
    register_reader,
)
from explain._utils.resources import packaged_text
from explain.engine import Evidence, Need
from explain.engine.needs import BiasTerms, applied
from explain.engine.perturbations import keep_graph
from explain.layers.stitched import Stitched

Kind = Literal["inproceedings", "article", "misc"]
_VENUE = {"inproceedings": "booktitle", "article": "journal", "misc": "howpublished"}


@dataclass(frozen=True)
class Citation(CheckedFields):
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

    >>> print(
    ...     Citation(
    ...         "doe2020maps", "Doe, Jane", "Maps of Everything", 2020, "Journal of Maps", "article"
    ...     ).bibtex()
    ... )
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
        """Refuse a key, an author or a title that would make an invalid BibTeX entry."""
        super().__post_init__()
        if not re.fullmatch(r"[A-Za-z0-9:_.+-]+", self.key):
            raise MethodError(
                f"key of a source must be letters, digits and :_.+-, got {shown(self.key)}; change "
                "it"
            )
        for text in (self.authors, self.title):
            if not text or text.count("{") != text.count("}"):
                raise MethodError(
                    f"authors and title of a source must have as many {{ as }}, got {shown(text)}"
                )

    def bibtex(self) -> str:
        """Return the BibTeX entry."""
        fields = {
            "author": self.authors,
            "title": f"{{{self.title}}}",
            _VENUE[self.kind]: self.venue,
            "year": self.year,
        }
        fields |= {"doi": self.doi, "eprint": self.arxiv, "archiveprefix": self.arxiv and "arXiv"}
        lines = "".join(f"  {name} = {{{value}}},\n" for name, value in fields.items() if value)
        return f"@{self.kind}{{{self.key},\n{lines}}}"


@cache
def _bibliography() -> dict[str, Citation]:
    """The papers of ``bibliography.bib``, by their keys and by the names of the methods that they
    are for; read once. The layout of the file (two spaces, one field a line) is fixed.
    """
    text = packaged_text("explain.methods", "bibliography.bib")
    sources: dict[str, Citation] = {}
    for kind, key, body in re.findall(r"@(\w+)\{([^,]+),\n(.*?)\n\}", text, re.DOTALL):
        entry = dict(re.findall(r"^  (\w+) = \{(.*)\},$", body, re.MULTILINE))
        title = entry["title"].strip("{}")
        year = int(entry["year"])
        venue = entry[_VENUE[kind]]
        source = Citation(
            key=key,
            authors=entry["author"],
            title=title,
            year=year,
            venue=venue,
            kind=kind,
            doi=entry.get("doi", ""),
            arxiv=entry.get("eprint", ""),
            shorthand=entry["shorthand"],
        )
        # an entry with the field "methods" is for all of these
        sources |= dict.fromkeys([key, *entry.get("methods", key).split(", ")], source)
    return sources


def cited(key: str) -> Citation:
    """Return the source with this key, or of the method with this name, from
    ``bibliography.bib``."""
    return _bibliography()[key]


Style = Literal["heat", "intensity", "signed", "color", "evidence", "certified"]
"""How an attribution is read: heat over the image, brightness, positive against negative, a colour
picture, sets of regions, or places that are certified."""

Fusion = Literal["mean", "max", "product", "sum", "stages"]
"""How the maps of several layers become one: each divided by its largest magnitude, but for a sum.
Of stages, the maps of one resolution are added, and the sums multiplied."""


MAPS = "class activation maps"
PATTERNS = "patterns of the feature maps"
PERTURBATION = "perturbation"
GRADIENTS = "gradients"
RELEVANCE = "relevance"
ATTENTION = "attention"
OTHERS = "other methods"
FAMILIES = (MAPS, PATTERNS, PERTURBATION, GRADIENTS, RELEVANCE, ATTENTION, OTHERS)
"""In the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How an estimate went: for each of N images what is known beside the map, None where a method
    does not give it."""

    # the error of each value, in the map's shape
    error: torch.Tensor | None = None
    # ``(N,)`` each: the altered images that were run, those planned without an early end, and false
    # where an interrupt cut the estimate short
    spent: torch.Tensor | None = None
    planned: torch.Tensor | None = None
    finished: torch.Tensor | None = None
    # ``(N,)``, the share of the scores' variance that a surrogate explains
    r2: torch.Tensor | None = None
    # ``(N,)``, the value of a place that makes no difference, where it is not zero
    neutral: torch.Tensor | None = None
    # `EvidenceSets`
    sets: Any = None
    # ``(N,)``, the L2 norm of a change of the input below which a certified map's answers hold
    radius: torch.Tensor | None = None
    # ``(N, M, M)``: what pairs of regions do together, and each alone on the diagonal
    interactions: torch.Tensor | None = None
    # ``(N, M, 2)``: where regions lie, as parts of the sides
    centres: torch.Tensor | None = None


@dataclass(frozen=True)
class Method(CheckedFields):
    """A way to attribute a score: a frozen dataclass whose fields are its options.

    A method of your own is a subclass with its ``needs`` and ``__call__``; all else has a default,
    such as the ``name``, which is that of the class in small letters. When an object is made, each
    option is checked against the type of its field, and against ``minimums`` and ``below``.

    ``needs`` says which evidence the engine has to gather. Calling the method with that evidence
    gives the raw
    attribution: ``(N, h, w)`` at the layer's resolution, or ``(N, C, H, W)`` in pixels. ``summary``
    and ``paper`` are what a list of methods prints, ``source`` what `explain.cite` gives, and
    ``style`` is how the map is drawn.
    """

    family: ClassVar[str] = OTHERS
    """With which methods it is listed: one of `FAMILIES`."""
    only_for: ClassVar[str] = ""
    """Which networks or inputs it can explain, where not all."""
    control: ClassVar[str] = ""
    """What it does instead of explaining, for a method that others are compared with."""
    one_input: ClassVar[bool] = False
    """Whether it takes one explained input only, and cannot tell what several of them do
    together."""
    by_score: ClassVar[bool] = False
    """Whether it divides by the score, so that a negative one reverses all signs."""
    adds_up: ClassVar[bool] = False
    """Whether it adds up maps or gradients that may cancel, so that nothing but rounding errors is
    left."""
    layer_optional: ClassVar[bool] = False
    """Whether it explains the input, or a layer where one is named: ``in_layer`` is then the method
    for the layer."""
    fusion: ClassVar[Fusion | None] = None
    """How it fuses the maps of several layers; where no layer is named, it gets one of each
    resolution."""

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def summary(self) -> str:
        return ""

    @property
    def paper(self) -> str:
        return "" if self.source is None else self.source.shorthand

    @property
    def source(self) -> Citation | None:
        """The paper to cite: the entry of ``bibliography.bib`` for the method's name, or else for
        the nearest class that it derives from; None where there is no entry."""
        # a subclass without an entry cites the method that it changes
        names = (getattr(kind, "name", "") for kind in type(self).__mro__)
        return next(
            (_bibliography()[name] for name in (self.name, *names) if name in _bibliography()), None
        )

    @property
    def style(self) -> Style:
        return "heat"

    @property
    def needs(self) -> frozenset[Need[Any]]:
        """The evidence that the engine gathers before it calls the method."""
        return frozenset()

    def __call__(self, evidence: Evidence) -> torch.Tensor:
        """The raw attribution from the evidence that the method ``needs``: ``(N, h, w)`` or ``(N,
        C, H, W)``. A pure function of tensors: it never sees the model."""
        raise NotImplementedError

    def expected_sum(self, evidence: Evidence) -> torch.Tensor | None:
        """What the values of all explained inputs add up to if the method is complete, ``(N,)`` in
        units of the score, such as the score less that of the baseline; None where a method
        promises no sum."""
        return None

    def delta(self, evidence: Evidence, values: torch.Tensor) -> torch.Tensor | None:
        """The convergence delta ``(N,)``: the sum of the values ``(N, ...)`` less their expected
        sum, in units of the score; None where no sum is promised. `explain.attribute` stores it in
        the result."""
        expected = self.expected_sum(evidence)
        return None if expected is None else values.flatten(1).sum(1) - expected

    def outcome(self, evidence: Evidence) -> Outcome:
        """How many photos were run and how exact the values are, for a method that runs the model
        on altered photos; empty for others. Called after the method itself, with the same
        evidence."""
        return Outcome()

    def channels(self, evidence: Evidence) -> torch.Tensor | None:
        """What each channel of the layer contributes to the map, ``(N, C)``, for results that rank
        channels; None where the method explains no layer."""
        return None

    def in_layer(self) -> "Method":
        """The form of the method that explains a layer, for a call that names one; only methods
        with ``layer_optional`` differ."""
        return self

    def with_frames(self, x: torch.Tensor, *, frames_first: bool) -> "Method":
        """The method for videos or volumes ``x`` ``(N, C, T, H, W)``, with options that depend on
        the direction adjusted; methods in its fields are adjusted too. ``frames_first`` says that
        the model takes ``(N, T, C, H, W)``."""
        changed = {}
        for name, inner in options(self).items():
            if isinstance(inner, Method):
                changed[name] = inner.with_frames(x, frames_first=frames_first)
        return replace(self, **changed) if changed else self

    @property
    def delta_needs(self) -> frozenset[Need[Any]]:
        """Those of its needs that only the convergence delta uses, such as the score of the
        baseline."""
        return frozenset()

    @property
    def differentiable(self) -> bool:
        """Whether its values keep their graph when a call asks for it with ``create_graph``, as a
        loss on maps requires."""
        return self.family not in (PERTURBATION, PATTERNS, ATTENTION) and keep_graph(
            self.needs - self.delta_needs
        )

    @property
    def lacks_range(self) -> bool:
        """Whether it uses the range of the inputs, and its options ``low`` and ``high`` (one number
        for each channel) do not name one yet."""
        return False

    def tried(self) -> "Method":
        """The method with the fewest runs that show whether it can explain a network at all, for a
        trial before a method is chosen."""
        return replace(self, samples=2) if "samples" in options(self) else self  # type: ignore[call-arg]


def options(method: Method) -> dict[str, Any]:
    """Return the fields of a method and their values: with its name, enough to make it again."""
    return {option.name: getattr(method, option.name) for option in fields(method)}


def uses_layer(method: Method) -> bool:
    """Whether a method needs evidence about a layer, so that a call must name or find one."""
    return any(map(attrgetter("of_layer"), method.needs))


def can_be_stitched(method: Method, model: torch.nn.Module) -> bool:
    """Whether a method works on a `Stitched` model, which runs over windows: it explains the input
    without attention or biases, or maps a layer. True for all other models.
    """
    if not isinstance(model, Stitched):
        return True
    family = innermost_method(method).family
    biases = any(isinstance(need, BiasTerms) for need in method.needs)
    return family in (MAPS, PATTERNS) if uses_layer(method) else family != ATTENTION and not biases


def over_all(per_image: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Bring one number for each image ``(N,)`` into the shape ``(N, 1, ...)``, which broadcasts
    over ``like`` ``(N, ...)``."""
    return per_image.reshape([-1] + [1] * (like.ndim - 1))


def ratio(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """The quotient ``above / below``, and 0 where ``below`` is 0; without the usual epsilon, which
    would swamp small gradients."""
    return torch.where(
        below == 0, torch.zeros_like(above), above / torch.where(below == 0, 1, below)
    )


def relative_error(values: torch.Tensor, error: torch.Tensor) -> torch.Tensor:
    """Return the largest error of each image over its largest magnitude, ``(N,)``: infinite where
    only all values are zero, NaN where no error is known."""
    largest = error.flatten(1).amax(1)
    peak = values.abs().flatten(1).amax(1)
    return torch.where(largest == 0, largest, largest / peak)


def spatial_dims(maps: torch.Tensor) -> tuple[int, ...]:
    """The dimensions of places: height and width, and frames of a video."""
    return tuple(range(2, maps.ndim))


def cam_map(method: str, cam: Method, evidence: Evidence) -> torch.Tensor:
    """The map ``(N, h, w)`` of the CAM that is an option of the method called ``method``."""
    values = applied(cam, evidence)
    if values.ndim != len(evidence.size) + 1:
        raise MethodError(
            f"cam of {method} must give a map (N, h, w), got {cam.name}; take one such as gradcam"
        )
    return values


def check_range(method: str, low: tuple[float, ...] | None, high: tuple[float, ...] | None) -> None:
    """Refuse the options ``low`` and ``high`` of a method's input range, one number for each
    channel, where one is missing or they are in the wrong order. ``method`` is its name.
    """
    if low is None and high is None:
        return
    if (
        not low
        or not high
        or len(low) != len(high)
        or any(a >= b for a, b in zip(low, high, strict=True))
    ):
        raise MethodError(
            f"low of {method} must be below high, got {shown(low)} and {shown(high)}; give both "
            "for each"
        )


MethodLike: TypeAlias = str | Method
M = TypeVar("M", bound="Method | type[Method]")

DEEPEST = 5
"""How many methods may be within each other, the innermost counted; their runs multiply."""

_known: dict[str, Method] = {}
_texts: dict[str, Method] = {}
"""Methods by texts that have been read, such as ``smooth(gradcam)``."""
_TEXTS = 64
"""How many of these there are at most."""
_wrappers: dict[str, Callable[..., Method]] = {}


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def register(method: M) -> M:
    """Make a method known by its name.

    Above a class, as ``@register``, it is made a frozen dataclass, if it is none yet, and the
    method with its default options becomes known; an object is registered as it is.

    Raises:
        MethodError: the name is taken by another method, or cannot be one.
    """
    if isinstance(method, type) and method.name is Method.name:  # the fallback, for objects
        method.name = method.__name__.lower()  # type: ignore[assignment]
    _texts.clear()
    return enter(_known, method, "method")  # type: ignore[no-any-return]


def register_wrapper(name: str, wrapper: Callable[..., Method]) -> None:
    """Make ``name(inner, option=value)`` mean ``wrapper(inner, option=value)`` for every method."""
    _wrappers[name] = wrapper


@keywords()
def list_methods(pattern: str = "*") -> list[str]:
    """Return the names of the methods that match a glob pattern, in alphabetical order.

    Any of them can stand in the brackets of ``smooth(...)`` and ``augmented(...)`` too.

    >>> list_methods("guided*")
    ['guidedbackprop', 'guidedgradcam', 'guidedintegratedgradients']
    """
    return names_like(_known, pattern, MethodError)


def get_method(method: MethodLike) -> Method:
    """Return the method for a name, such as "smooth(gradcam, samples=5)"; a method object stays as
    it is. Raises `MethodError` if there is none."""
    if isinstance(method, str):
        read = _known.get(method) or _texts.get(method)
        if read is None:
            read = _by_text(method.strip())
            _texts[method] = read
            if len(_texts) > _TEXTS:  # the latest are kept; another thread may drop the same one
                _texts.pop(next(iter(_texts)), None)
        return read
    if not isinstance(method, Method):
        raise MethodError(
            f"method must be a name or a method object, got {shown(method)}; see "
            "explain.list_methods()"
        )
    return method


def is_lasting(method: Method) -> bool:
    """Whether this very object is registered, or was read from a text and is kept, so that its
    identity cannot come to mean another method. `explain.attribute` remembers requests by it."""
    return _known.get(method.name) is method or id(method) in map(id, _texts.values())


def _by_text(text: str) -> Method:
    """Read a method from a text such as ``gradcam``, ``integratedgradients(steps=20)`` or
    ``smooth(gradcam, samples=5)``; errors name the method and the remedy."""
    name = text.partition("(")[0]
    if "," in name:  # several methods, as in "gradcam,lrp"
        remedy = python_or_command("give a list of names", "give --method for each")
        raise MethodError(f"method must be one name, got {shown(text)}; {remedy}")
    if name.strip().lower() not in _wrappers:
        return named_in(_known, text, "method", MethodError, "integratedgradients(steps=20)")
    try:
        read = read_written(text)
        # the method in the brackets comes first, or by its name: smooth(method=gradcam)
        inner, *surplus = read.values or (read.options.pop("method", None),)
        if surplus or not isinstance(inner, str):
            raise SpecError(f"must have one method in its brackets, got {shown(text)}")
        return _wrappers[read.name](_by_text(inner.strip()), **read.options)
    except (SpecError, ArgumentError) as error:
        raise MethodError(f"method {error}; write it like smooth(gradcam, samples=5)") from None
    except TypeError:  # a wrapper takes a method, and nothing else
        raise MethodError(
            f"method {read.name} takes no options, got {', '.join(read.options)}; leave them"
        ) from None


def _check_inner(name: str, inner: Method, option: str) -> None:
    """Check a method that is the field ``option`` of the method called ``name``: refuse methods
    that fuse layers, and deep nesting, whose runs multiply.
    """
    if inner.fusion is not None:
        raise MethodError(
            f"{option} of {name} must look at one layer, got {inner.name}; wrap the method that it "
            "fuses"
        )
    if _levels(inner) >= DEEPEST:
        raise MethodError(
            f"{option} of {name} must hold at most {DEEPEST - 1} methods, got {inner.name:.50}"
        )


def _levels(method: Method) -> int:
    """How many methods are nested in each other through their options, this one counted."""
    inner = [value for value in options(method).values() if isinstance(value, Method)]
    return 1 + max(map(_levels, inner), default=0)


register_reader(
    Method,
    "a method object or a name",
    lambda it: get_method(it) if isinstance(it, str) else it,
    _check_inner,
)


def method_or_unknown(method: str | Method) -> Method:
    """The method of a name, for records that may name methods this installation lacks; for an
    unknown name, a plain `Method` without metadata."""
    try:
        return get_method(method)
    except MethodError:
        return Method()


@cache
def _titles() -> dict[str, str]:
    """How the names of methods are spelled where people read them, from ``titles.json``."""
    titles: dict[str, str] = json.loads(packaged_text("explain.methods", "titles.json"))
    return titles


def title_of(name: str) -> str:
    """Return the name of a method as people write it, such as "SmoothGrad(LayerCAM)": from
    ``titles.json``, else the name of its class, else the name itself."""
    return re.sub(r"[a-z0-9+]+", _title, name)


def _title(match: re.Match[str]) -> str:
    """The spelling of one word of a method's name: from ``titles.json``, else the name of its
    class, else the word itself.
    """
    name = match[0]
    class_name = type(_known[name]).__name__ if name in _known else name
    spelled_as_class = class_name if class_name.lower() == name else name
    return _titles().get(name, spelled_as_class)


def innermost_method(method: str | Method) -> Method:
    """Return the method inside all wrappers, as ``saliency`` in ``smooth(saliency)``; its family
    and metadata hold for the whole. A plain `Method` for an unknown name."""
    outer = method_or_unknown(method)
    inner = getattr(outer, "method", None)
    return innermost_method(inner) if isinstance(inner, Method) else outer
