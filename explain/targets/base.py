"""What a target is, how targets add up, and the class scores in a model's output."""

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch

from explain._utils import nested
from explain._utils.errors import ModelError, TargetError
from explain._utils.options import CheckedFields
from explain.targets.labels import from_start
from explain.targets.outputs import Activation

Picked: TypeAlias = tuple[torch.Tensor, torch.Tensor | None]
Labels: TypeAlias = Sequence[str] | None
SCORES = ("logits", "out")
"""What models call their class scores."""


class Target:
    """What is explained: one score for each image. Targets add up: ``a + b``, ``a - b``, ``2 * a``.

    A target of your own is a frozen dataclass with a ``name`` and a ``pick``; all else has a
    default. One that reads a choice from the output (a class, a region, a box) makes it in
    ``resolved``, on the images as they are, so that it is the same for every perturbed image.
    One that holds something for each image has ``rows``.
    """

    if TYPE_CHECKING:  # a class attribute here would be the default of fields called name

        @property
        def name(self) -> str: ...

    def pick(self, output: Any, count: int) -> Picked:
        """Return the scores ``(count,)`` that are explained, and the class indices ``(count,)``
        that they belong to, or None.

        ``output`` is the model's for ``count`` images or perturbed copies. The scores keep their
        graph.
        """
        if (resolved := self.resolved(output, count)) is self:
            raise NotImplementedError(f"{type(self).__name__} must have a method pick")
        return resolved.pick(output, count)

    def resolved(self, output: Any, count: int) -> "Target":
        """Return the target with its choices made (which class, region, box), on the output for the
        images as they are.

        Called once, before the images are altered; the result is picked from all outputs.
        """
        return self.mapped(lambda target: target.resolved(output, count))

    def rows(self, images: torch.Tensor) -> "Target":
        """Return the resolved target for a batch of perturbed copies: ``images`` ``(P,)`` are the
        images of its samples, counted from 0."""
        return self.mapped(lambda target: target.rows(images))

    def mapped(self, change: Callable[["Target"], "Target"]) -> "Target":
        """Return the target with ``change`` applied to all targets that it is made of; most are
        made of none."""
        return self

    def labelled(self, categories: Labels) -> "Target":
        """Return the target with labels replaced by the indices of the classes in
        ``categories``."""
        return self.mapped(lambda target: target.labelled(categories))

    def for_input_size(self, size: tuple[int, ...]) -> "Target":
        """Return the target for a model whose input has this size, which ends in height and
        width."""
        return self.mapped(lambda target: target.for_input_size(size))

    def class_scores(self, output: Any, count: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the scores ``(count, K)`` of all classes in the resolved target's region or box,
        and its own classes ``(count,)``.

        Without a graph, for metrics that rank classes. None where the output has no others.
        """
        return None

    def of_classes(self, classes: tuple[int, ...]) -> "Target":
        """Return the resolved target for other classes ``(N,)`` in the same region or box."""
        raise NotImplementedError(
            f"{type(self).__name__} has no class_scores, and so no of_classes"
        )

    def probability(self, probabilities: torch.Tensor) -> torch.Tensor | None:
        """Return the probability ``(count,)`` of what is explained, from those of all classes
        ``(count, K)``; of a sum, the sum of its parts' probabilities.

        None where the score belongs to no classes: then it stands for itself.
        """
        return None

    activation: ClassVar[Activation | None] = None
    """What makes probabilities of the model's outputs, where asking for this target says it."""

    @property
    def gives_probability(self) -> bool:
        """Whether its scores are probabilities already."""
        return False

    def __add__(self, other: "Target") -> "Sum":
        return Sum(_terms(self) + _terms(other))

    def __sub__(self, other: "Target") -> "Sum":
        return self + -1.0 * Sum(_terms(other))

    def __neg__(self) -> "Sum":
        return -1.0 * self

    def __mul__(self, factor: float) -> "Sum":
        if not isinstance(factor, Real):
            return NotImplemented
        return Sum(tuple((factor * weight, target) for weight, target in _terms(self)))

    __rmul__ = __mul__


class CheckedTarget(CheckedFields, Target):
    """A target that callers make: a value that is not of its field's type is refused when it is
    made."""

    error = TargetError

    def _checked(self, checked: Any, value: Any) -> Any:
        """The value of a field, converted to the field's type; a class index that holds its label
        stays as it is."""
        plain = super()._checked(checked, value)
        return value if isinstance(plain, int) else plain  # a class index may hold its label


@dataclass(frozen=True)
class Sum(Target):
    """Several targets as one, such as "2 × 3 − 0": the sum of ``weight * score``."""

    terms: tuple[tuple[float, Target], ...]

    @property
    def name(self) -> str:
        """The sum's name in messages, captions, results and records, such as "2 × 3 − 0"."""
        words = []
        for weight, target in self.terms:
            factor = "" if abs(weight) == 1 else f"{abs(weight):g} × "
            words.append(f"{'−' if weight < 0 else '+'} {factor}{target.name}")
        return " ".join(words).removeprefix("+ ")

    def pick(self, output: Any, count: int) -> Picked:
        """The weighted sum ``(count,)`` of the targets' scores; it belongs to no class."""
        scores = [weight * target.pick(output, count)[0] for weight, target in self.terms]
        return torch.stack(scores).sum(0), None

    def probability(self, probabilities: torch.Tensor) -> torch.Tensor | None:
        parts = []
        for weight, target in self.terms:
            part = target.probability(probabilities)
            if part is None:
                return None
            parts.append(weight * part)
        return torch.stack(parts).sum(0)

    def mapped(self, change: Callable[[Target], Target]) -> "Sum":
        return Sum(tuple((weight, change(target)) for weight, target in self.terms))


def check_one_per_image(what: str, held: int, count: int) -> None:
    """Refuse a target that holds one thing (``what``) for each image, such as boxes, if it holds
    ``held`` instead of ``count``."""
    if held != count:
        raise TargetError(
            f"{what} must have one item for each of the {count} images, got {held}; give one "
            "alone to use it for all, and several targets for every image as targets="
        )


def images_of_samples(images: tuple[int, ...] | None, samples: torch.Tensor) -> tuple[int, ...]:
    """Return the original images of perturbed copies, where a target counts samples ``(P,)``, and
    these belong to ``images``. None for ``images`` means that sample i is image i.
    """
    return tuple(samples.tolist() if images is None else (images[i] for i in samples.tolist()))


def _terms(target: Any) -> tuple[tuple[float, Target], ...]:
    """The pairs (weight, target) of a sum of targets; a single target has weight 1."""
    if isinstance(target, Sum):
        return target.terms
    if isinstance(target, Target):
        return ((1.0, target),)
    raise TargetError(
        f"targets add up with targets only, got {target!r}; use "
        f"explain.targets.as_target({target!r})"
    )


def find_tensor(output: Any, count: int, dims: Sequence[int], names: Sequence[str] = SCORES) -> Any:
    """Return the tensor in an output with ``count`` samples and one of ``dims`` dimensions, or
    None; earlier ``dims`` go first, and then earlier ``names``."""
    tensors = _tensors(output, names)
    return next((t for n in dims for t in tensors if t.ndim == n and len(t) == count), None)


def need_tensor(
    output: Any,
    count: int,
    dims: Sequence[int],
    target: Target,
    shape: str,
    names: Sequence[str] = SCORES,
) -> torch.Tensor:
    """Return the tensor that `find_tensor` finds; ``shape`` says in the error what ``target``
    needs.
    """
    tensor: torch.Tensor | None = find_tensor(output, count, dims, names)
    if tensor is None:
        raise unsuitable(target.name, f"{shape}, for {count} images", output)
    return tensor


def unsuitable(target: str, needs: str, output: Any) -> TargetError:
    """The `TargetError` for a target that needs something (``needs``) that a model's output does
    not have."""
    return TargetError(
        f"target {target} must have a model that returns {needs}, got {summary_of_output(output)}; "
        "give a class index, or a callable as target"
    )


READER: ContextVar[Any] = ContextVar("reader", default=None)
"""The `explain.engine.output_kinds.OutputReader` of the model whose outputs are read now, if there
is one."""


def find_logits(output: Any, count: int) -> torch.Tensor:
    """The class scores ``(count, K)`` in a model's output, rather than features that they are
    computed from; ``(count,)`` counts as the score of a single class.
    """
    scores = find_scores(output, count)
    reader = READER.get()
    # among several tensors, it may not have been sure which holds the scores
    if reader is not None and not isinstance(output, torch.Tensor):
        reader.say_if_unsure()
    if scores is not None:
        return scores if scores.ndim == 2 else scores.reshape(count, 1)
    first_tensor = next(iter(_tensors(output, SCORES)), None)
    of_image = output[0] if isinstance(output, (tuple, list)) and output else output
    remedy = ""
    if isinstance(of_image, Mapping) and {"boxes", "scores"} <= set(of_image):
        remedy = "for a detector take explain.targets.Detections(label), or "
    elif first_tensor is not None and first_tensor.ndim == 4:
        remedy = "for a map of classes take explain.targets.Segmentation(category), or "
    got = summary_of_output(output)
    raise ModelError(
        f"model must return class scores ({count}, K), got {got}; {remedy}give a callable target"
    )


def find_scores(output: Any, count: int) -> torch.Tensor | None:
    """The class scores in an output, ``(count, K)`` or one number an image in its own shape; None
    without any. The model's `OutputReader` decides between several, else the first counts.
    """
    if isinstance(output, torch.Tensor):
        if output.ndim > 2:
            is_one_place = len(output) == count and output.shape[2:].numel() == 1
            return output.flatten(1) if is_one_place else None
        length = output.shape[0] if output.ndim == 2 else output.numel()
        return output if length == count else None
    candidates = _candidates(output, count)
    first = next(iter(candidates.values()), None)
    reader = READER.get()
    if len(candidates) > 1 and reader is not None:
        # the key is chosen once, in the output that the reader recorded: this one may lack it
        return candidates.get(reader.scores_key(_candidates), first)
    return first


def _candidates(output: Any, count: int) -> Mapping[Any, torch.Tensor]:
    """The tensors in an output that may be class scores, by their key, the likeliest first.
    Where a name says which they are, these alone, with the key ``()``.
    """
    for tensor in items_named(output, SCORES):
        if isinstance(tensor, torch.Tensor) and tensor.ndim in (1, 2) and len(tensor) == count:
            return {(): tensor}
    tensors = [(key, t) for key, t in nested.items(output) if isinstance(t, torch.Tensor)]
    per_image_tensors = {key: t for key, t in tensors if t.ndim in (1, 2) and len(t) == count}
    if any(tensor.ndim == 2 for tensor in per_image_tensors.values()):
        floating_tensors = {key: t for key, t in per_image_tensors.items() if t.is_floating_point()}
        # rows of scores before single numbers
        return dict(
            sorted((floating_tensors or per_image_tensors).items(), key=lambda item: -item[1].ndim)
        )
    first_tensor = next(iter(_tensors(output, SCORES)), None)
    if first_tensor is not None and first_tensor.ndim <= 1 and first_tensor.numel() == count:
        return {(): first_tensor}
    return {}


def _tensors(output: Any, names: Sequence[str]) -> list[torch.Tensor]:
    """The tensors in a model's output, in which a target looks for its own: those with one of the
    names, then all in their order, so that some come twice."""
    if isinstance(output, torch.Tensor):
        return [output]
    values = items_named(output, names) + [value for _, value in nested.items(output)]
    return [value for value in values if isinstance(value, torch.Tensor)]


def items_named(output: Any, names: Sequence[str]) -> list[Any]:
    """The items or attributes of a model's output with these names, in their order; None in the
    place of one that it lacks."""
    items = dict(nested.items(output))
    if isinstance(output, Mapping):  # its attributes may be its keys again
        return [items.get(name) for name in names]
    return [items.get(name, getattr(output, name, None)) for name in names]


def summary_of_output(output: Any) -> str:
    """Say in a few words what a model returned, such as "dict with 'out' (1, 2)"."""
    kind = type(output).__name__
    if isinstance(output, torch.Tensor):
        return f"shape {tuple(output.shape)}"
    parts = [
        f"{key!r} {tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
        for key, value in nested.items(output)[:4]
    ]
    return f"{kind} with {', '.join(parts)}" if parts else kind


def class_index(index: int, classes: int) -> int:
    """Return a class index from 0 on; refuse one that the model, which has ``classes``, does not
    have."""
    from_zero: int = from_start(index, classes)
    if not 0 <= from_zero < classes:
        raise TargetError(
            f"target must be a class from 0 to {classes - 1} here, got {index}; leave it out for "
            "the top class"
        )
    return from_zero
