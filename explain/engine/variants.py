"""`Variants`: the same question, asked of altered inputs or of altered feature maps, in pieces that fit into memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar

import torch
from torch import nn

from explain.engine.blocks import attention_gradients
from explain.engine.evidence import at_least_float32
from explain.errors import ExplainError, MethodError, ModelError
from explain.hooks import HookGroup, Overwriting, Record, first_tensor, replace_first, untouched
from explain.inputs import Inputs, Path, dotted
from explain.layers import Grids
from explain.targets import ClassTarget, Target, find_logits, for_rows

if TYPE_CHECKING:
    from explain.engine.evidence import Evidence, Need

Precision: TypeAlias = Literal["full", "bf16"]
Progress = Callable[[int, int], Any]
T = TypeVar("T")
Make = Callable[[torch.Tensor], torch.Tensor]
"""From row numbers ``(b,)`` to ``b`` altered inputs or feature maps."""

MEMORY = 512 * 2**20
LARGEST = 1024


@dataclass(frozen=True)
class Work:
    """How long work is done: ``batch_size`` variants at a time (None: as many as fit into half a gigabyte), telling
    ``progress(done, total)`` after each piece, in bfloat16 where ``precision`` says so."""

    batch_size: int | None = None
    progress: Progress | None = None
    precision: Precision = "full"

    def __post_init__(self) -> None:
        if self.batch_size is not None and (not isinstance(self.batch_size, int) or self.batch_size < 1):
            raise MethodError(f"batch_size must be a whole number from 1, got {self.batch_size!r}")
        if self.precision not in ("full", "bf16"):
            raise MethodError(f"precision must be 'full' or 'bf16', got {self.precision!r}")


@dataclass
class Footprint:
    """The bytes that the modules of a network gave for each image, in the order in which they returned."""

    outputs: list[tuple[str, int]] = field(default_factory=list)
    channels_last: bool = True
    """Whether the network takes inputs in this layout, which convolutions on a CPU are faster in."""

    def watch(self, group: HookGroup, model: nn.Module, count: int) -> None:
        for name, module in model.named_modules():
            if name and not any(module.children()):
                group.forward(name, self._measure(name, count))

    def _measure(self, name: str, count: int) -> Callable[..., None]:
        def measure(module: nn.Module, args: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                self.outputs.append((name, tensor.numel() * tensor.element_size() // count))

        return measure

    def batch_size(self, *, graph: bool, after: str | None = None) -> int:
        """How many images fit into the budget: with a graph all outputs stay, without only the largest few."""
        names = [name for name, _ in self.outputs]
        inside = [i for i, name in enumerate(names) if after and f"{name}.".startswith(f"{after}.")]
        sizes = [size for _, size in self.outputs[max(inside, default=0) :]] or [MEMORY]
        needed = sum(sizes) if graph else 4 * max(sizes)
        return max(1, min(LARGEST, MEMORY // max(1, needed)))


def agree(one: torch.Tensor, other: torch.Tensor, inputs: torch.Tensor, work: Work, coarse: float = 1e-5) -> bool:
    """Whether scores are the same but for what batches of other sizes round otherwise.

    ``coarse`` is what counts as nothing in half precision.
    """
    precise = torch.finfo(inputs.dtype).eps < 1e-4 and work.precision == "full"
    return torch.allclose(one, other, rtol=1e-3 if precise else 0.1, atol=1e-5 if precise else coarse)


def asked_of(target: Target, classes: torch.Tensor | None, images: torch.Tensor) -> Target:
    """The target for rows that belong to these images: what was settled for the unaltered image stays so."""
    return for_rows(target, images) if classes is None else ClassTarget(tuple(classes[images].tolist()))


def not_by_image(ways: Iterable[Path]) -> ModelError:
    """What to say of inputs with as many rows as there are images, where the images say something else without them."""
    names = ", ".join(map(dotted, ways))
    return ModelError(
        "model must say the same of an image whatever stands beside it, but does not; name those of its inputs "
        f"({names}) that belong to no single image in explain.Inputs(..., shared=...)"
    )


class Gather(Protocol):
    """The engine's `gather`, as far as variants use it."""

    def __call__(
        self, inputs: Inputs, needs: frozenset[Need], target: Target, layers: tuple[str, ...], work: Work
    ) -> Evidence: ...


class Explains(Protocol):
    """A method, as far as variants use it."""

    @property
    def needs(self) -> frozenset[Need]: ...

    def __call__(self, evidence: Evidence) -> torch.Tensor: ...


@contextmanager
def autocast(inputs: torch.Tensor, precision: Precision) -> Iterator[None]:
    """Compute in bfloat16, or as the model and the caller would."""
    if precision == "full":
        yield
        return
    with torch.autocast(inputs.device.type, torch.bfloat16):
        yield


@dataclass(frozen=True)
class Variants:
    """Runs the model again: every row of a batch of variants belongs to an image, and is asked for that image's class.

    ``rows`` are numbered from 0; ``owners`` ``(P,)`` says whose each is, and a `Make` builds the rows it is asked for.
    """

    model: nn.Module
    inputs: Inputs
    grids: Grids
    target: Target
    classes: torch.Tensor | None
    layer: str | None
    record: Record | None
    """The layer's call, with its output as the network gave it."""
    width: int | None
    """How many scores the network gives each image, if it gives any."""
    footprint: Footprint
    work: Work
    gather: Gather
    running: Callable[[], Any]

    def scores(self, owners: torch.Tensor, make: Make) -> torch.Tensor:
        """The score ``(P,)`` of each variant of the input."""
        found = []
        for rows in self._pieces(len(owners)):
            images = owners[rows]
            found.append(self._score(images, partial(self._in_fastest_layout, images, make(rows), self._plainly)))
        return torch.cat(found) if found else at_least_float32(self.inputs.x.new_zeros(0))

    def attributions(
        self, method: Explains, owners: torch.Tensor, make: Make
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each piece, its row numbers ``(b,)`` and what ``method`` says of these variants, ``(b, ...)``."""
        layers = (self.layer,) if self.layer is not None and any(need.of_layer for need in method.needs) else ()
        inner = replace(self.work, progress=None)
        for rows in self._pieces(len(owners), graph=True):
            images = owners[rows]
            ask = partial(self.gather, needs=method.needs, target=self.target_of(images), layers=layers, work=inner)
            evidence = self._in_fastest_layout(images, make(rows), ask)
            if evidence.logits is not None:
                self._check(evidence.logits.shape[1])
            yield rows, method(evidence)

    def scores_from_layer(self, owners: torch.Tensor, make: Make) -> torch.Tensor:
        """The score ``(P,)`` of each variant of the layer's feature maps, ``(b, C, h, w)``."""
        return self._from_layer(owners, make, self._score)

    def logits_from_layer(self, owners: torch.Tensor, make: Make) -> torch.Tensor:
        """The class scores ``(P, K)`` of each variant of the layer's feature maps."""
        return self._from_layer(owners, make, self._logits)

    def attention_gradients_by_block(self) -> list[torch.Tensor]:
        """For each transformer block, the gradient in its attention of the score that the head reads off its output."""
        with self._running():
            return attention_gradients(self.model, self.inputs, self.target_of)

    def target_of(self, images: torch.Tensor) -> Target:
        return asked_of(self.target, self.classes, images)

    def _from_layer(self, owners: torch.Tensor, make: Make, read: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Run up to the layer once for each image and piece, and from there on for all variants.

        A network in which something leads past the layer may not take more rows behind it than before it, or say
        something else of them, which the last row of the first piece is to show; it runs whole for every variant.
        """
        found: list[torch.Tensor] = []
        order: list[torch.Tensor] = []
        fans_out, done = True, 0
        for image in range(len(self.inputs)):
            mine = (owners == image).nonzero()[:, 0]
            for piece in self._pieces(len(mine), after=self.layer, done=done, total=len(owners)):
                rows = mine[piece]
                if fans_out:
                    try:
                        few = self._replaced(owners[rows], owners[rows][:1], make(rows), read)
                        if not found and len(rows) > 1:
                            self._must_agree(
                                few[-1:], self._replaced(owners[rows[-1:]], owners[rows[-1:]], make(rows[-1:]), read)
                            )
                        found.append(few)
                    except torch.cuda.OutOfMemoryError:
                        raise
                    except (RuntimeError, ValueError, IndexError, ExplainError):
                        fans_out = False
                if not fans_out:
                    found.append(self._replaced(owners[rows], owners[rows], make(rows), read))
                order.append(rows)
            done += len(mine)
        if not found:
            return at_least_float32(self.inputs.x.new_zeros(0))
        values = torch.cat(found)
        return values[torch.argsort(torch.cat(order))]

    def _replaced(
        self, images: torch.Tensor, before: torch.Tensor, maps: torch.Tensor, read: Callable[..., torch.Tensor]
    ) -> torch.Tensor:
        """Run the network on the images ``before`` the layer, and behind it with ``maps`` that belong to ``images``."""
        assert self.record is not None
        altered, record = self._laid_out(maps, images), self.record
        overwriting, calls = Overwriting(), Counter[str]()

        def replaced(module: nn.Module, args: Any, output: Any) -> Any:
            tensor = first_tensor(output)
            calls[record.layer] += 1
            if calls[record.layer] != record.call + 1:
                return None
            if tensor is not None and overwriting.is_by(record.layer, tensor):
                if tensor.shape == altered.shape:
                    tensor.copy_(altered)  # who reads it by its older name sees the change too
                    return None
                tensor.fill_(float("nan"))  # who reads it by its older name is to show: that one has fewer rows
            return replace_first(output, altered.clone())  # the network may overwrite it, and run once more

        def run(inputs: Inputs) -> Any:
            calls.clear()  # it may run once more in another layout
            with HookGroup(self.model) as group:
                overwriting.watch(group, record.layer)
                group.forward(record.layer, replaced)
                return inputs.call(self.model)

        found = read(images, partial(self._in_fastest_layout, before, self.inputs.x[before], run))
        if len(before) != len(images) and torch.isnan(found).any():
            raise RuntimeError("something reads what the layer overwrote, which has fewer rows")
        return found

    def _must_agree(self, few: torch.Tensor, whole: torch.Tensor) -> None:
        if not agree(few, whole, self.inputs.x, self.work, coarse=1e-2):
            raise RuntimeError("the network says something else where there are more rows behind the layer")

    def _laid_out(self, maps: torch.Tensor, images: torch.Tensor) -> torch.Tensor:
        """Feature maps as the layer would have given them."""
        assert self.record is not None
        assert self.layer is not None
        raw = self.record.activation
        grid = self.grids.grid(tuple(raw.shape), self.layer)
        assert grid is not None  # the maps were laid out by it
        return grid.fold(maps.to(raw), raw.index_select(grid.of_images, images))

    def _score(self, images: torch.Tensor, run: Callable[[], Any]) -> torch.Tensor:
        with self._running():
            output = run()
            if self.width is not None and self.inputs.others:
                self._check(find_logits(output, len(images)).shape[1])
            return at_least_float32(self.target_of(images).pick(output, len(images))[0].detach())

    def _logits(self, images: torch.Tensor, run: Callable[[], Any]) -> torch.Tensor:
        with self._running():
            return at_least_float32(find_logits(run(), len(images)).detach())

    def _check(self, width: int) -> None:
        """Refuse scores for other classes than those of the images as they are: some input says what they are."""
        if self.width not in (None, width):
            raise not_by_image(self.inputs.others)

    def _plainly(self, inputs: Inputs) -> Any:
        return inputs.call(self.model)

    def _in_fastest_layout(self, images: torch.Tensor, altered: torch.Tensor, run: Callable[[Inputs], T]) -> T:
        altered = altered.to(self.inputs.x)
        several = len(altered) > 1  # one alone is faster by little, and see `Inputs.copied`
        if self.footprint.channels_last and several and altered.device.type == "cpu" and altered.ndim == 4:
            try:
                return run(self.inputs.rows(images, altered.contiguous(memory_format=torch.channels_last)))
            except RuntimeError as error:
                if "view" not in str(error):  # what .view() says of a layout that it cannot take
                    raise
                self.footprint.channels_last = False
        return run(self.inputs.rows(images, altered))

    @contextmanager
    def _running(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.running())
            stack.enter_context(untouched(self.model))
            stack.enter_context(autocast(self.inputs.x, self.work.precision))
            yield

    def _pieces(
        self, count: int, *, graph: bool = False, after: str | None = None, done: int = 0, total: int | None = None
    ) -> Iterator[torch.Tensor]:
        size = self.work.batch_size or self.footprint.batch_size(graph=graph, after=after)
        for start in range(0, count, size):
            stop = min(count, start + size)
            yield torch.arange(start, stop, device=self.inputs.x.device)
            if self.work.progress is not None:
                self.work.progress(done + stop, count if total is None else total)
