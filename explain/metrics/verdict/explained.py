"""The maps of an `Explanation`, checked with the model that made them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Protocol

from PIL import Image

from explain.errors import MetricError, naming
from explain.methods import Method, get_method
from explain.metrics.verdict.answers import Answers, Verdict
from explain.metrics.verdict.checking import check_maps
from explain.result import Attribution
from explain.targets import ClassTarget, as_target


class Explained(Protocol):
    """An explanation, as far as it takes to check its maps."""

    @property
    def photo(self) -> Image.Image: ...

    @property
    def source(self) -> str | None: ...

    @property
    def explainer(self) -> Any: ...

    @property
    def request(self) -> Any: ...

    @property
    def crops(self) -> Sequence[Any]: ...

    @property
    def targets(self) -> list[str]: ...

    @property
    def question(self) -> Any: ...

    @property
    def verdicts(self) -> dict[int, Verdict]: ...


def check_explained(explanation: Explained, found: Sequence[Attribution], index: int, **options: Any) -> Verdict:
    """Check maps of the target at a position, and keep the verdict among those of the explanation.

    Raises:
        MetricError: it is a copy, and has no model to ask; or the maps are of several crops.
    """
    if explanation.explainer is None or explanation.request is None:
        raise MetricError("explanation must have its model to be checked, but is a copy; explain the photo again")
    if explanation.crops:
        raise MetricError("maps must be of one crop to be checked, got some of five; use crop='center'")
    chosen, request, explainer = found[0].target, explanation.request, explanation.explainer
    own = as_target(request.targets[index], explainer.categories)
    target = own if isinstance(chosen, str) else ClassTarget((int(chosen[0]),))
    given = [] if isinstance(request.methods, str) else request.methods
    maps = [(method_behind(each, given), each) for each in found]
    precision, label = explanation.question.precision, explanation.targets[index]
    with naming([explanation.source]):
        x = explainer.as_input(explanation.photo)
        verdict = check_maps(
            explainer.model, x, maps, target, label, precision=precision, activation=explainer.activation, **options
        )
    known = explanation.verdicts.get(index)
    explanation.verdicts[index] = verdict if known is None else known.with_answers(verdict)
    return verdict


def answers_of(explanation: Explained, method: str, index: int) -> Answers | None:
    """The answers about a map, if it was checked."""
    verdict = explanation.verdicts.get(index)
    return None if verdict is None else verdict.answers.get(method)


def method_behind(attribution: Attribution, given: Sequence[Method] = ()) -> Method:
    """The method that made an attribution, with its options; one of these, or one that is known by its name.

    >>> import torch
    >>> one = torch.ones(1, 1, 1)
    >>> method_behind(Attribution("gradcam", one, "score", one[0, 0], None, (1, 1), options={"relu": False}))
    GradCAM(relu=False)
    """
    method = next((each for each in given if each.name == attribution.method), None) or get_method(attribution.method)
    made_with = {each.name for each in fields(method) if each.init}  # type: ignore[arg-type]
    options = {name: value for name, value in attribution.options.items() if name in made_with}
    return replace(method, **options)  # type: ignore[type-var]
