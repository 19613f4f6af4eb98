"""Interventions: frozen values that say what a layer gives instead, and `intervene`, which applies them by hooks.

A forward hook that returns a value replaces the layer's output. An intervention is such a hook as a value: a layer, the
units of it that are meant, and what takes their place. What is replaced is a copy: the layer's own tensor is untouched.
"""

import math
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import nn

from explain._utils import nested, providers
from explain._utils.errors import ExplainError, HookError, warn
from explain._utils.random_numbers import seeded
from explain._utils.signals import came_by_signal, signal_safe, temporarily
from explain.data.inputs import Inputs
from explain.hooks.attention_parts import NO_ATTENTION
from explain.hooks.capturing import read_outputs
from explain.hooks.group import HookGroup
from explain.hooks.layer_names import Layout, Units, find_places, name_of, place_of
from explain.hooks.preserve import copied, is_under_way, untouched
from explain.hooks.unwrap import inserting, unwrapped


class _Here(threading.local):
    """What holds for this thread: the images of rows, and the interventions on each model."""

    images: tuple[torch.Tensor, ...] = ()

    def __init__(self) -> None:
        self.active: WeakKeyDictionary[nn.Module, dict[Intervention, tuple[Intervention, ...]]] = WeakKeyDictionary()


_here = _Here()


def rows_of(*images: torch.Tensor) -> AbstractContextManager[None]:
    """Say which of the explained images each row of a batch belongs to, for values that differ between images.

    Several tensors are for parts of the network that run with other numbers of rows.
    """
    return temporarily(_here, images=images)


def for_rows(values: torch.Tensor, count: int, what: str) -> torch.Tensor:
    """Bring values ``(N, ...)`` of N images, or one for all, to the ``count`` rows of a batch."""
    if len(values) == 1:
        return values
    images = next((each for each in _here.images if len(each) == count), None)
    if images is not None and int(images.max()) < len(values):
        return values[images.to(values.device)]
    if count == 1 and is_under_way():
        return values[:1]  # of the first image, as where layers are looked for
    if len(values) != count:
        raise HookError(f"{what} must have values for 1 or {count} images, got {len(values)}; give one for all")
    return values


@dataclass(frozen=True, eq=False, repr=False)
class Intervention(Units):
    """What a layer gives instead; see `Patch`, `Ablate`, `Steer`, `Project` and `Replace`.

    ``layer`` is a name or pattern, with ``@1`` for one of its calls, ``:input`` for the first tensor that it is given,
    and ``:q``, ``:k``, ``:v``, ``:pattern`` or ``:heads`` for a part of the attention inside it; where ``heads`` are
    given, ``:heads`` is meant. The default is all of it. ``channels``, ``tokens``, ``heads``, ``positions`` (pairs of a
    row and a column of its map) and ``region`` (x0, y0, x1, y1 in pixels of the model's input, exclusive ends) select
    units; several intersect. Maps are ``(N, C, H, W)`` or ``(N, H, W, C)``, tokens ``(N, T, C)``, and attention
    ``(N, heads, T, d)``; ``channel_dim`` says which dimension channels are in, where that is not clear.
    """

    layer: str

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.layer, str):
            raise HookError(f"layer must be a name such as 'layer3' or 'layer3@1', got {self.layer!r:.60}")

    def replacement(self, values: torch.Tensor, channel_dim: int, over: Sequence[int]) -> torch.Tensor:
        """Return what takes the place of ``values`` ``(N, ...)``, in the same shape or one that broadcasts to it.

        ``over`` are the dimensions of positions: rows and columns of a map, or tokens.
        """
        raise NotImplementedError

    def bound(self, model: nn.Module) -> "Intervention":
        """The intervention with all that it takes from the model; most take nothing."""
        return self

    def __str__(self) -> str:
        units = "; ".join(self.chosen())
        return f"{type(self).__name__.lower()} {self.layer}{units and f' ({units})'}"

    def __repr__(self) -> str:
        found = [repr(self.layer)]
        for name in (each.name for each in fields(self) if each.repr and each.name != "layer"):
            value = getattr(self, name)
            text = f"tensor of {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            found += [] if value is None else [f"{name}={text}"]
        return f"{type(self).__name__}({', '.join(found)})"


@dataclass(frozen=True, eq=False, repr=False)
class Patch(Intervention):
    """Gives the units of a layer the values that they have elsewhere (activation patching).

    Args:
        layer: see `Intervention`.
        values: a tensor that broadcasts to the layer's output ``(N, ...)``, or an input of the model to take them from:
            a batch of images, a tuple of positional or a mapping of keyword arguments. A tensor that the model takes is
            an input.
        from_input: whether ``values`` is an input; None finds out.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with intervene(model, [Patch("0", torch.tensor([5.0, -5.0]), from_input=False)]):
    ...     model(torch.zeros(1, 2)).tolist()
    [[5.0, 0.0]]
    """

    values: Any = None
    from_input: bool | None = field(default=None, kw_only=True)

    def bound(self, model: nn.Module) -> Intervention:
        given, chosen = self.values, self.from_input
        if chosen is False or (chosen is None and not isinstance(given, (torch.Tensor, tuple, list, Mapping))):
            if isinstance(given, torch.Tensor):
                return self
            raise HookError(f"values of {self} must be a tensor or an input of the model, got {type(given).__name__}")
        try:
            found = activations_of(model, self.layer, given)
        except Exception as error:
            if chosen or not isinstance(given, torch.Tensor) or isinstance(error, (ExplainError, MemoryError)):
                raise
            if came_by_signal(error) or "memory" in str(error) or "device" in str(error):
                raise  # which says nothing of what the model takes
            return self  # the model does not take it: these are values
        if chosen is None and isinstance(given, torch.Tensor) and given.shape[1:] == found.shape[1:]:
            raise HookError(f"values of {self} may be an input or the layer's output; say which by from_input=")
        return replace(self, values=found, from_input=False)

    def replacement(self, values: torch.Tensor, channel_dim: int, over: Sequence[int]) -> torch.Tensor:
        new = self.values.to(values)
        return for_rows(new, len(values), str(self)) if new.ndim == values.ndim else new


@dataclass(frozen=True, eq=False, repr=False)
class Ablate(Intervention):
    """Ablates the units of a layer: replaces their values by ones without information.

    Args:
        layer: see `Intervention`.
        by: "zero"; "mean", each channel's mean over the positions of its map, or over the ``reference``; "resample",
            values of other positions of the map drawn at random, or those of the ``reference``; or a baseline of
            `explain.baselines`, applied to the layer's map.
        reference: an input of the model to take other values from, of one image or of several, whose mean is taken.
        seed: of what "resample" draws.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with intervene(model, [Ablate("0", channels=[1])]):
    ...     model(torch.ones(1, 2))[0, 1].item()
    0.0
    """

    by: Any = "zero"
    reference: Any = field(default=None, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    values: torch.Tensor | None = field(default=None, kw_only=True, repr=False)
    """The reference's values, once they are known."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.by not in ("zero", "mean", "resample") and not callable(self.by):
            raise HookError(f"by must be 'zero', 'mean', 'resample' or a baseline, got {self.by!r:.60}")

    def bound(self, model: nn.Module) -> Intervention:
        if self.reference is None:
            return self
        return replace(self, reference=None, values=activations_of(model, self.layer, self.reference))

    def replacement(self, values: torch.Tensor, channel_dim: int, over: Sequence[int]) -> torch.Tensor:
        if self.by == "zero":
            return torch.zeros_like(values)
        known = None if self.values is None else self.values.to(values)
        if self.by == "mean" and known is not None:
            return known.mean([0, *over], keepdim=True)
        if self.by == "resample" and known is not None:
            return known[torch.randint(len(known), (1,), generator=seeded(self.seed)).to(known.device)]
        if not over or math.prod(values.shape[dim] for dim in over) < 2:
            raise HookError(f"{self} must be on a layer with positions, got one vector; give a reference")
        if self.by == "mean":
            return values.mean(list(over), keepdim=True)
        if self.by == "resample":
            return self._resampled(values, over)
        if values.ndim < 4 or len(over) < 2:
            raise HookError(f"{self} by a baseline must be on a map (N, C, H, W), got {tuple(values.shape)}")
        maps = values.movedim(channel_dim, 1)
        covered: torch.Tensor = self.by(maps, maps.new_zeros(1, 1, *maps.shape[2:]))
        return covered.to(values).movedim(1, channel_dim)

    def _resampled(self, values: torch.Tensor, over: Sequence[int]) -> torch.Tensor:
        """The values of positions drawn with replacement, the same for all channels."""
        last = list(range(values.ndim - len(over), values.ndim))
        moved = values.movedim(list(over), last)
        flat = moved.flatten(last[0])
        drawn = torch.randint(flat.shape[-1], (flat.shape[-1],), generator=seeded(self.seed)).to(values.device)
        return flat[..., drawn].reshape(moved.shape).movedim(last, list(over))


@dataclass(frozen=True, eq=False, repr=False)
class Steer(Intervention):
    """Adds ``strength`` times a ``direction`` to the units of a layer.

    Args:
        layer: see `Intervention`.
        direction: ``(C,)``, along the channels, or a tensor that broadcasts to the layer's output.
        strength: by how much.

    >>> model = nn.Sequential(nn.Identity())
    >>> with intervene(model, [Steer("0", torch.tensor([1.0, 0.0]), 3)]):
    ...     model(torch.zeros(1, 2))
    tensor([[3., 0.]])
    """

    direction: Any = None
    strength: float = 1.0

    def replacement(self, values: torch.Tensor, channel_dim: int, over: Sequence[int]) -> torch.Tensor:
        direction, count = torch.as_tensor(self.direction).to(values), values.shape[channel_dim]
        if direction.ndim == 1:
            direction = direction.reshape([-1 if dim == channel_dim else 1 for dim in range(values.ndim)])
        try:
            direction = direction.expand(values.shape)
        except RuntimeError:
            got = tuple(direction.shape)
            raise HookError(f"direction of {self} must have the layer's {count} channels, got {got}") from None
        return values + self.strength * direction


@dataclass(frozen=True, eq=False, repr=False)
class Project(Intervention):
    """Takes directions out of a layer: its vectors along the channels lose what they have in the span of these.

    With ``towards`` ``(C,)``, their part in that span becomes that of this vector instead of zero, as of the mean over
    photos without a concept (Anders et al., Finding and Removing Clever Hans, Information Fusion 2022).

    Args:
        layer: see `Intervention`.
        directions: ``(C,)`` or ``(K, C)``; they need not be orthogonal.
        strength: the share that is taken out, from 0 to 1.

    >>> model = nn.Sequential(nn.Identity())
    >>> with intervene(model, [Project("0", torch.tensor([2.0, 0.0]))]):
    ...     model(torch.tensor([[3.0, 4.0]]))
    tensor([[0., 4.]])
    """

    directions: Any = None
    strength: float = 1.0
    towards: Any = field(default=None, kw_only=True)

    def replacement(self, values: torch.Tensor, channel_dim: int, over: Sequence[int]) -> torch.Tensor:
        wide = torch.promote_types(values.dtype, torch.float32)
        directions = torch.as_tensor(self.directions).to(values.device, wide)  # half precision would turn them
        directions, count = directions.reshape(-1, directions.shape[-1]), values.shape[channel_dim]
        if directions.shape[1] != count or not directions.any():
            got = tuple(directions.shape)
            raise HookError(f"directions of {self} must have the layer's {count} channels and not be zero, got {got}")
        _, sizes, right = torch.linalg.svd(directions / directions.abs().max(), full_matrices=False)
        basis = right[sizes > sizes.max() * torch.finfo(wide).eps * max(directions.shape)].to(values)
        last = values.movedim(channel_dim, -1)
        aside = last if self.towards is None else last - torch.as_tensor(self.towards).to(values)
        taken = (aside @ basis.T) @ basis
        found: torch.Tensor = last - self.strength * taken
        return found.movedim(-1, channel_dim)


@dataclass(frozen=True, eq=False, repr=False)
class Replace(Intervention):
    """Replaces what a layer gives by what a function or module makes of it, such as a sparse autoencoder.

    Args:
        layer: see `Intervention`.
        by: from the layer's output to what takes its place.
        name: what the module is called: its layers are then ``"LAYER/NAME"``, ``"LAYER/NAME.decoder"`` and so on,
            wherever a layer is named.

    >>> model = nn.Sequential(nn.Identity())
    >>> with intervene(model, [Replace("0", torch.neg)]):
    ...     model(torch.ones(1, 2))
    tensor([[-1., -1.]])
    """

    by: Any = None
    name: str = field(default="inserted", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.by):
            raise HookError(f"by must be a function or a module, got {self.by!r:.60}")
        if not re.fullmatch(r"\w+", self.name):
            raise HookError(f"name must be a word without dots, got {self.name!r}")

    def replacement(self, values: torch.Tensor, channel_dim: int, over: Sequence[int]) -> torch.Tensor:
        made = self.by(values)
        if isinstance(made, tuple):  # as of autoencoders that return their latents, too
            made = next((each for each in made if getattr(each, "shape", None) == values.shape), made)
        if not isinstance(made, torch.Tensor):
            raise HookError(f"{self} must give a tensor of shape {tuple(values.shape)}, got {type(made).__name__}")
        return made


def activations_of(model: nn.Module, layer: str, x: Any) -> torch.Tensor:
    """Run a model, and return what a layer gives, or the part of it that is named: a copy, without a graph."""
    args, kwargs = ((), x) if isinstance(x, Mapping) else (x if isinstance(x, (tuple, list)) else (x,), {})
    with untouched(model), HookGroup(model) as group:
        found = read_outputs(group, [layer], lambda tensor: tensor.detach().clone())[layer]
        model(*args, **kwargs)
    if len(found) != 1:
        raise HookError(f"layer {layer!r} must run once to give values, but ran {len(found)} times; name a call of it")
    return found[0]


Interventions: TypeAlias = Intervention | Iterable[Intervention]


@signal_safe
def intervene(model: nn.Module, interventions: Interventions) -> Iterator[tuple[Intervention, ...]]:
    """Apply interventions to a model for as long as the block lasts, for calls of this thread.

    Those on the same layer act in their order, each on the output of the one before; one that is active already is not
    applied twice. Everything that is computed inside the block sees them: predictions, gradients and explanations. The
    values that they take from inputs are computed first.

    Raises:
        HookError: something does not fit the layer. LayerError: a layer is not in the model.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU())
    >>> x = torch.rand(1, 1, 4, 4)
    >>> with intervene(model, [Ablate("0", channels=[1]), Steer("1", torch.ones(2))]):
    ...     y = model(x)
    >>> torch.equal(y[:, 1], torch.ones(1, 4, 4)), torch.equal(y[:, 0], model(x)[:, 0] + 1)
    (True, True)
    """
    several = [interventions] if isinstance(interventions, Intervention) else list(interventions)
    if not several:
        yield ()
        return
    for each in several:
        if not isinstance(each, Intervention):
            raise HookError(f"interventions must be values such as Ablate('layer3'), got {each!r:.60}")
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise HookError("model must run on one device for interventions, got DataParallel on several; use model.module")
    model = unwrapped(model)
    outer = _here.active.get(model, {})
    known = {*outer, *(each for bound in outer.values() for each in bound)}
    several = [each for each in several if each not in known]  # a caller of this has applied the others already
    replaced = [each for each in several if isinstance(each, Replace) and isinstance(each.by, nn.Module)]
    inserted = [(f"{each.layer}/{each.name}", each.by) for each in replaced]
    if len(dict(inserted)) < len(inserted):
        raise HookError(f"names of modules that are inserted at {inserted[0][0]} must differ; give each a name=")
    with inserting(model, inserted), HookGroup(model) as group:
        placed = {each: _placed(each, model) for each in several}
        with HookGroup(model) as first:  # values are taken from the model with what is inserted, and else as it is
            for each in replaced:
                for at in placed[each]:
                    _apply(first, at, _Passes(), model)
            applied = {each: tuple(at.bound(model) for at in found) for each, found in placed.items()}
        passes, bound = _Passes(), tuple(at for found in applied.values() for at in found)
        group.forward_pre("", passes.begin, with_kwargs=True)
        for at in bound:
            _apply(group, at, passes, model)
        _here.active[model] = {**outer, **applied}
        try:
            yield bound
        finally:
            _here.active[model] = outer
        idle = [at for at in bound if at not in passes.acted]
        if passes.count and idle:
            why = f", or {NO_ATTENTION}" if any(place_of(at.layer, model).of_attention for at in idle) else ""
            warn(f"interventions had no effect, since their layers did not run{why}: {', '.join(map(str, idle))}")


def _placed(each: Intervention, model: nn.Module) -> list[Intervention]:
    """An intervention at each of the places that its layer selects."""
    to_heads, places = each.heads is not None, find_places(model, each.layer).values()
    names = [name_of(place._replace(part="heads") if to_heads and not place.part else place) for place in places]
    return [each if each.layer == name else replace(each, layer=name) for name in names]


class _Passes:
    """The calls of a model: the size of its photo, which regions are relative to, and which interventions acted."""

    def __init__(self) -> None:
        self.count, self.images = 0, 0
        self.size: tuple[int, ...] = ()
        self.acted: set[Intervention] = set()
        self.given: tuple[Any, Any] = (), {}

    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.given = args, kwargs
        given = [tensor for _, tensor in nested.paths(self.given)]
        photos = [tensor for tensor in given if tensor.ndim >= 4 and tensor.is_floating_point()]
        first = next((tensor for tensor in [*photos, *given] if tensor.ndim), None)
        self.count += 1
        self.size = tuple(photos[0].shape[-2:]) if photos else ()
        self.images = 0 if first is None else len(first)


def active_interventions(model: nn.Module) -> tuple[Intervention, ...]:
    """The interventions that this thread has applied to a model, with the values that they took from inputs."""
    return tuple(bound for each in _here.active.get(model, {}).values() for bound in each)


def _apply(group: HookGroup, each: Intervention, passes: _Passes, model: nn.Module) -> None:
    """Register the hook of an intervention on its layer."""
    place = place_of(each.layer, model)

    def act(module: nn.Module, args: Any, output: Any) -> Any:
        passes.acted.add(each)
        values = nested.first_tensor(output)
        if values is None:
            raise HookError(f"{each} must be on a layer that gives a tensor, got {type(output).__name__}")
        shape, counts = tuple(values.shape), {passes.images, *map(len, _here.images)}
        tokens_first = len(values) not in counts and values.ndim == 3 and shape[1] in counts
        if each.of_places and len(values) not in counts and not tokens_first:
            raise HookError(f"{each} must be on a layer of {passes.images} rows, got {shape}; take one around it")
        length = 0 if len(shape) < 3 else shape[0] if tokens_first else shape[-2]
        find_grid = partial(_photo_grid, model, passes.given, each.layer, length)
        layout = Layout(
            values, place, module, model, passes.size, str(each), each.channel_dim,
            of_images=int(tokens_first), find_grid=find_grid,
        )  # fmt: skip
        new = each.replacement(values, layout.channel_dim, layout.places)
        mask = layout.mask(each)
        if mask is not None or not isinstance(each, Replace):
            try:
                new = new.expand(shape)
            except RuntimeError:
                raise HookError(f"{each} must broadcast to {shape}, got {tuple(new.shape)}; reshape it") from None
        new = new.clone() if mask is None else torch.where(mask, new, values)
        return nested.replace(output, lambda path, tensor: new if tensor is values else tensor)

    act.__name__ = str(each)
    group.forward(each.layer, act)


_photo_grids: WeakKeyDictionary[nn.Module, dict[Any, Any]] = WeakKeyDictionary()
"""What tells how a model's tokens lie on photos of some size."""


def _photo_grid(model: nn.Module, given: tuple[Any, Any], layer: str, length: int) -> Any:
    """How so many tokens that a layer gives lie on the photo; None where it is not known.

    It is looked at in a copy of the model, which has none of the hooks that are active, and shares its parameters.
    """
    key = tuple((path, tensor.shape[1:]) for path, tensor in nested.paths(given))
    known = _photo_grids.setdefault(model, {})
    if key not in known:
        try:
            known[key] = providers.grids_of_photo(copied(model, share=True), Inputs(*given))
        except Exception as error:  # a model that cannot be copied, or is given no photo
            if came_by_signal(error):
                raise
            return None
    return known[key](layer, length)


Applied: TypeAlias = AbstractContextManager[tuple[Intervention, ...]]


def patch(model: nn.Module, layer: str, values: Any, **units: Any) -> Applied:
    """`intervene` with one `Patch`.

    >>> model = nn.Sequential(nn.Identity())
    >>> with patch(model, "0", torch.tensor([[5.0]]), from_input=False):
    ...     model(torch.ones(1, 1))
    tensor([[5.]])
    """
    return intervene(model, [Patch(layer, values, **units)])


def ablate(model: nn.Module, layer: str, by: Any = "zero", **units: Any) -> Applied:
    """`intervene` with one `Ablate`."""
    return intervene(model, [Ablate(layer, by, **units)])


def steer(model: nn.Module, layer: str, direction: Any, strength: float = 1.0, **units: Any) -> Applied:
    """`intervene` with one `Steer`."""
    return intervene(model, [Steer(layer, direction, strength, **units)])
