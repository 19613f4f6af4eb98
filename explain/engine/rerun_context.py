"""What altered rows are made of and how they are run, and what is refused of networks that cannot be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import nn

from explain._utils.errors import ModelError, note, raised
from explain.data.inputs import Inputs, Path, dotted
from explain.engine.evidence import Evidence, RowOrigin, at_least_float32
from explain.engine.forward import Forward, ResolvedTarget
from explain.engine.plan import Plan
from explain.engine.replay import Tape
from explain.engine.settings import Footprint, RuntimeSettings, agree, autocast
from explain.hooks import untouched
from explain.targets import Target

T = TypeVar("T")


class EvidenceLookup(Protocol):
    """From a layer or none, and of several explained inputs one, to what was found for a target."""

    def __call__(self, layer: str | None, path: Path | None = None) -> Evidence: ...


class GatherFunction(Protocol):
    """The engine's `gather`, as far as altered rows need it."""

    def __call__(
        self, inputs: Inputs, plan: Plan, targets: Sequence[Target], work: RuntimeSettings, origin: RowOrigin
    ) -> Sequence[EvidenceLookup]: ...


def refuse_shared(ways: Iterable[Path]) -> NoReturn:
    """Refuse inputs with as many rows as there are images, where the images say something else without them."""
    names = ", ".join(map(dotted, ways))
    raise ModelError(
        "model must say the same of an image whatever stands beside it, but does not; name those of its inputs "
        f"({names}) that belong to no single image in explain.Inputs(..., shared=...)"
    )


class DependentRowsError(Exception):
    """A row has another score among others than alone."""


class DependentImagesError(ModelError):
    """An image has another score among the others than alone."""


@dataclass(eq=False)
class RerunContext:
    """What altered rows are made of, and how they are run."""

    forward: Forward
    choices: Sequence[ResolvedTarget]
    evidence: Callable[..., Evidence]
    """From a choice, a layer or none, and a path or none."""
    footprint: Footprint
    work: RuntimeSettings
    gather: GatherFunction
    running: Callable[[], Any]
    tapes: dict[str, Tape] = field(default_factory=dict)
    """What lies before a layer, by its name, as far as the forward pass put it on tape."""
    channels_last: bool = True
    """Whether the network takes inputs in this layout, which convolutions on a CPU are faster in."""
    one_at_a_time: bool = False
    fixed: bool = False
    """Whether the network takes as many rows as there are images, and no other number."""
    proved: set[str | None] = field(default_factory=set)
    """Where an altered row, of the input or of a layer, was shown to have the same score alone as among others."""
    again: bool = False
    """Whether a method runs further rows, after some that were shown not to depend on each other."""
    longest: int = 0
    """The number of rows of the longest stream, of which one is run alone to see that rows do not depend on others."""
    interrupted: list[BaseException] = field(default_factory=list)
    """What has ended the work early, where what there is by then is wanted."""

    @property
    def model(self) -> nn.Module:
        return self.forward.model

    @property
    def inputs(self) -> Inputs:
        return self.forward.inputs


def check_width(asked: RerunContext, logits: torch.Tensor | None) -> None:
    """Refuse scores for other classes than those of the images as they are: some input says what they are."""
    known = asked.forward.logits
    if asked.inputs.others and known is not None and logits is not None and logits.shape[1] != known.shape[1]:
        refuse_shared(asked.inputs.others)


def in_fastest_layout(
    asked: RerunContext, images: torch.Tensor, altered: Mapping[Path, torch.Tensor], run: Callable[[Inputs], T]
) -> T:
    """Run altered rows that belong to these images, channels last where the network takes them so."""
    first = altered[asked.inputs.path]
    several = len(first) > 1  # one alone is faster by little, and see `Inputs.copied`
    if asked.channels_last and several and first.device.type == "cpu" and first.ndim == 4:
        turned = {path: _channels_last(tensor) for path, tensor in altered.items()}
        try:
            return run(asked.inputs.rows(images, turned))
        except RuntimeError as error:
            if "view" not in str(error):  # what .view() says of a layout that it cannot take
                raise
            note(f"inputs are laid out channels first, which is slower on a CPU: {raised(error)}")
            asked.channels_last = False
    return run(asked.inputs.rows(images, altered))


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def scores_agree(asked: RerunContext, choice: ResolvedTarget, one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two scores of altered rows are the same but for rounding."""
    scale = asked.forward.scale(choice)
    return agree(one.to(choice.score), other.to(choice.score), asked.inputs.x, asked.work, scale, 1e-2)


def scores_of(choice: ResolvedTarget, images: torch.Tensor, output: Any) -> torch.Tensor:
    """What a target picks of an output with rows that belong to these images."""
    return at_least_float32(choice.of_rows(images).pick(output, len(images))[0].detach())


@contextmanager
def running_altered(asked: RerunContext) -> Iterator[None]:
    """Run the model outside of `gather`, as it does: alone in its thread, left as found, in the precision asked for."""
    with asked.running(), untouched(asked.model), autocast(asked.inputs.x, asked.work.precision):
        yield
