"""Altered rows, as values: what is altered, what is asked of each row, and how the answers are added up.

Equal values are run once for all methods and targets of a call, so that what methods share costs nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch

from explain.engine.evidence import Evidence
from explain.engine.needs import Activations, Need

Make = Callable[[torch.Tensor], torch.Tensor]
"""From row numbers ``(b,)`` to ``b`` altered inputs or feature maps: new tensors, which the network may overwrite."""


@dataclass(frozen=True)
class PerturbedRows:
    """Altered rows: ``owners`` ``(P,)`` says whose each row is, and ``make`` builds those that it is asked for.

    ``carry`` does to a tensor with a row for each image what was done to the photo's geometry: ``(tensor, rows)`` to
    one row for each altered row. None means that nothing was moved. ``keep`` gives the masks of rows, where there are.
    """

    owners: torch.Tensor
    make: Make
    carry: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    keep: Make | None = None


class Perturbation(Hashable, Protocol):
    """A plan of altered rows, as a frozen value: equal ones are run once for all methods of a call.

    With ``of_layer`` it alters feature maps ``(b, C, h, w)`` of a layer, otherwise inputs ``(b, C, H, W)``. It may look
    at the evidence that it ``needs``, and at nothing that depends on the target.
    """

    @property
    def of_layer(self) -> bool: ...

    @property
    def needs(self) -> frozenset[Need[Any]]: ...

    def count(self, channels: int) -> int:
        """How many rows each image has at most, where the layer has so many channels."""
        ...

    def rows(self, evidence: Evidence) -> PerturbedRows: ...


class Accumulator(Protocol):
    """What adds up the results of altered rows as they come."""

    def add(self, images: torch.Tensor, numbers: torch.Tensor, values: torch.Tensor) -> None:
        """Take what was found for rows ``numbers`` ``(b,)``, which belong to ``images`` ``(b,)``: ``(b, ...)``."""
        ...

    def enough(self) -> bool:
        """Whether no more rows are wanted."""
        ...

    def result(self) -> Any: ...


@runtime_checkable
class PartialResults(Protocol):
    """What adds up results and has something to show before all of them have come."""

    def done(self) -> torch.Tensor:
        """Which images ``(N,)`` want no more rows."""
        ...

    def so_far(self) -> torch.Tensor | None:
        """The map that there is by now, with zeros for images without one; None where no image has any."""
        ...

    def partial(self) -> Any:
        """The result, marked as unfinished; None where some image has none yet."""
        ...


class Reducer(Hashable, Protocol):
    """A way to add up results of altered rows in constant memory, as a frozen value."""

    def begin(self, evidence: Evidence) -> Accumulator: ...


@runtime_checkable
class SizeDependent(Protocol):
    """An alteration whose number of rows depends on how large the photo is."""

    def count_at(self, size: tuple[int, ...]) -> int:
        """How many rows each image has at most."""
        ...


@runtime_checkable
class Following(Protocol):
    """An alteration whose rows of a second explained input follow those of the first."""

    def rows_beside(self, evidence: Evidence, first: PerturbedRows) -> PerturbedRows:
        """The rows of another input; ``first`` has those of the first."""
        ...


@runtime_checkable
class TokenPerturbation(Protocol):
    """An alteration that leaves tokens out where the first block of a transformer begins.

    Its rows are truth values ``(b, h, w)``, true for those that stay: as many in each row. It alters no layer.
    """

    of_tokens: ClassVar[bool]


class Attributor(Protocol):
    """A method, as far as the engine uses it."""

    @property
    def needs(self) -> frozenset[Need[Any]]: ...

    def __call__(self, evidence: Evidence) -> torch.Tensor: ...


@dataclass(frozen=True)
class Scores(Need[torch.Tensor]):
    """The score ``(P,)`` of each altered row; for other numbers than the score's, the class scores ``(P, K)``."""

    of: Perturbation
    logits: bool = False

    @property
    def of_layer(self) -> bool:
        return self.of.of_layer or any(need.of_layer for need in self.of.needs)

    @property
    def also(self) -> frozenset[Need[Any]]:
        return self.of.needs


@dataclass(frozen=True)
class Attributions(Need[Any]):
    """What a method says of each altered row, added up by a fold."""

    of: Perturbation
    method: Attributor
    fold: Reducer

    @property
    def of_layer(self) -> bool:
        return any(need.of_layer for need in (*self.method.needs, *self.of.needs))

    @property
    def of_input(self) -> bool:
        return any(need.of_input for need in self.method.needs)

    @property
    def also(self) -> frozenset[Need[Any]]:
        return self.of.needs


@dataclass(frozen=True)
class Unperturbed:
    """The photo, or a layer's feature maps, as they are: what other rows are compared with."""

    of_layer: bool = False

    is_reference: ClassVar[bool] = True

    @property
    def needs(self) -> frozenset[Need[Any]]:
        return frozenset({Activations()}) if self.of_layer else frozenset()

    def __str__(self) -> str:
        return "the layer's own maps" if self.of_layer else "the photo itself"

    def count(self, channels: int) -> int:
        return 1

    def rows(self, evidence: Evidence) -> PerturbedRows:
        own = evidence.activations if self.of_layer else evidence.inputs
        return PerturbedRows(torch.arange(len(own), device=own.device), lambda rows: own[rows])


@dataclass(frozen=True)
class ZeroInput:
    """A photo of zeros, which is what preprocessing makes of the training data's mean colour."""

    is_reference: ClassVar[bool] = True
    of_layer: ClassVar[bool] = False
    needs: ClassVar[frozenset[Need[Any]]] = frozenset()

    def __str__(self) -> str:
        return "a blank photo"

    def count(self, channels: int) -> int:
        return 1

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs
        return PerturbedRows(torch.arange(len(x), device=x.device), lambda rows: torch.zeros_like(x[rows]))


class PerturbationRunner(Protocol):
    """Runs altered rows that a method can name only when it sees the evidence."""

    @property
    def kept(self) -> dict[Any, Any]:
        """Where a method may keep what it has worked out from its runs."""
        ...

    @property
    def ended(self) -> bool:
        """Whether an interrupt has ended the work: no more rows are run."""
        ...

    def end(self, error: KeyboardInterrupt, *, partial: bool) -> None:
        """End the work early; ``partial`` says whether a method has something to show by now.

        Raises:
            KeyboardInterrupt: it has nothing, or what there is by an interrupt is not wanted.
        """
        ...

    def scores(self, of: Perturbation, *, logits: bool = False) -> torch.Tensor:
        """The score ``(P,)`` of each altered row, or its class scores ``(P, K)``."""
        ...

    def read(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """What a method says of each altered row, added up by a fold."""
        ...

    def read_for_all(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """The same, and what it says for the other targets of the call is remembered for them.

        Nobody is told of these rows: a method that runs few at a time says itself how far it is, with `tell`.
        """
        ...

    def read_once(self, of: Perturbation, method: Attributor, fold: Reducer) -> Any:
        """The same, and not remembered; nobody is told of these rows either."""
        ...

    def tell(self, done: int, total: int, maps: Callable[[], Mapping[str, torch.Tensor]] = dict) -> None:
        """Tell who waits how many of a method's own rows are done, and the ``maps`` so far by its name."""
        ...

    def remembered(self) -> Iterator[tuple[Need[Any], Any]]:
        """What this target has been asked, also on the way for another one, and the answers."""
        ...


@dataclass(frozen=True)
class PerturbationRuns(Need[PerturbationRunner]):
    """Permission to run altered rows that depend on what was found; with ``of_layer``, a layer's maps are altered."""

    of_layer: bool = False
