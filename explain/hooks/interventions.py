"""Interventions: frozen values that say what a layer gives instead; `explain.hooks.intervening`
applies them.

A forward hook that returns a value replaces the layer's output. An intervention is such a hook as a
value: a layer, the units of it that are meant, and what takes their place. What is replaced is a
copy: the layer's own tensor is untouched.
"""

import math
import re
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from explain._utils.errors import ExplainError, HookError
from explain._utils.random_numbers import seeded
from explain._utils.signals import came_by_signal, temporarily
from explain.hooks.capturing import read_outputs
from explain.hooks.group import HookGroup
from explain.hooks.preserve import is_in_untouched_block, untouched
from explain.hooks.units import Axes, Units


class _SampleNumbering(threading.local):
    """Which of the explained images each sample of a batch belongs to, in this thread."""

    image_numbers: tuple[torch.Tensor, ...] = ()
    """For each length b of batch that parts of the network run with, the image ``(b,)`` of each
    sample: what lies before a perturbed layer may run on fewer samples than what lies behind it."""


_numbering = _SampleNumbering()


def intervening_on_samples(*images: torch.Tensor) -> AbstractContextManager[None]:
    """Tell interventions inside the block which image each sample of a batch is a copy of: numbers
    ``(b,)``, one tensor for each number of samples that parts run with."""
    return temporarily(_numbering, image_numbers=images)


def sample_counts() -> set[int]:
    """The numbers of samples that parts of the network may run with, as `intervening_on_samples`
    tells."""
    return {len(numbers) for numbers in _numbering.image_numbers}


def values_for_batch(values: torch.Tensor, count: int, owner: str) -> torch.Tensor:
    """The values ``(N, ...)`` of N images as ``(count, ...)``, for a batch with perturbed copies of
    these images; those of one image, ``(1, ...)``, are for all. An error names their ``owner``."""
    if len(values) == 1:
        return values
    # parts that run on fewer samples than others have a numbering of their own, of that length;
    # two of one length would be the same
    image_of_sample = next(
        (numbers for numbers in _numbering.image_numbers if len(numbers) == count), None
    )
    # values of fewer images than are explained cannot be indexed; the error below says so
    if image_of_sample is not None and int(image_of_sample.max()) < len(values):
        return values[image_of_sample.to(values.device)]
    # Explanations run inside `untouched`, and also their first image alone, as when layers are
    # looked for. Elsewhere, a batch of one image with values for several is a mistake.
    if count == 1 and is_in_untouched_block():
        return values[:1]
    if len(values) != count:
        raise HookError(
            f"{owner} must have values for 1 or {count} images, got {len(values)}; give one for all"
        )
    return values


@dataclass(frozen=True, eq=False, repr=False)
class Intervention(Units):
    """What a layer gives instead; see `Patch`, `Ablate`, `Steer`, `Project` and `Replace`.

    ``layer`` is a name or pattern, with ``@1`` for one of its calls, ``:input`` for the first
    tensor that it is given, and ``:q``, ``:k``, ``:v``, ``:pattern`` or ``:heads`` for a part of
    the attention inside it; where ``heads`` are given, ``:heads`` is meant. The default is all of
    it. ``channels``, ``tokens``, ``heads``, ``positions`` (pairs of a row and a column of its map)
    and ``region`` (x0, y0, x1, y1 in pixels of the model's input, exclusive ends) select units;
    several intersect. Maps are ``(N, C, H, W)`` or ``(N, H, W, C)``, tokens ``(N, T, C)``, and
    attention ``(N, heads, T, d)``; ``channel_dim`` says which dimension channels are in, where that
    is not clear.
    """

    layer: str

    def __post_init__(self) -> None:
        """Check the options; also called by subclasses."""
        super().__post_init__()
        if not isinstance(self.layer, str):
            raise HookError(
                f"layer must be a name such as 'layer3' or 'layer3@1', got {self.layer!r:.60}"
            )

    def replacement(self, values: torch.Tensor, axes: Axes) -> torch.Tensor:
        """Return the values that take the place of a layer's ``values`` ``(N, ...)``, in their
        shape or one that broadcasts to it.

        Called for each call of the layer, with all of its units; only those that are chosen are
        replaced. ``axes`` has the dimensions of channels and positions. ``values`` must not be
        changed in place.
        """
        raise NotImplementedError

    def bound(self, model: nn.Module) -> "Intervention":
        """The intervention with values that it takes from runs of the model; called once, before it
        acts. Most take nothing."""
        return self

    def __str__(self) -> str:
        units = "; ".join(self.chosen())
        return f"{type(self).__name__.lower()} {self.layer}{units and f' ({units})'}"

    def __repr__(self) -> str:
        """The intervention as it would be written, with tensors by their shapes."""
        words = [repr(self.layer)]
        for option in fields(self):
            value = getattr(self, option.name)
            if option.repr and option.name != "layer" and value is not None:
                text = (
                    f"tensor of {tuple(value.shape)}"
                    if isinstance(value, torch.Tensor)
                    else repr(value)
                )
                words.append(f"{option.name}={text}")
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass(frozen=True, eq=False, repr=False)
class Patch(Intervention):
    """Gives the units of a layer the values that they have elsewhere (activation patching).

    Args:
        layer: see `Intervention`.
        values: a tensor that broadcasts to the layer's output ``(N, ...)``, or an input of the
            model to take them from: a batch of images, a tuple of positional or a mapping of
            keyword arguments. A tensor that the model takes is an input.
        from_input: whether ``values`` is an input; None finds out.

    >>> from explain.hooks import intervene
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> with intervene(model, [Patch("0", torch.tensor([5.0, -5.0]), from_input=False)]):
    ...     model(torch.zeros(1, 2)).tolist()
    [[5.0, 0.0]]
    """

    values: Any = None
    from_input: bool | None = field(default=None, kw_only=True)

    def bound(self, model: nn.Module) -> Intervention:
        """Run the model on the input that the values come from, and return a `Patch` of the layer's
        activations there.

        Without ``from_input``, a tensor that the model takes is an input. The result has
        ``from_input=False``.
        """
        is_tensor = isinstance(self.values, torch.Tensor)
        may_be_input = is_tensor or isinstance(self.values, (tuple, list, Mapping))
        if self.from_input is False or (self.from_input is None and not may_be_input):
            if is_tensor:
                return self
            got = type(self.values).__name__
            raise HookError(
                f"values of {self} must be a tensor or an input of the model, got {got}"
            )
        try:
            values = activations_of(model, self.layer, self.values)
        except Exception as error:
            # errors of the run, such as of missing memory or a wrong device, are the caller's; any
            # other means that the model does not take the tensor as an input
            is_of_run = isinstance(error, (ExplainError, MemoryError)) or came_by_signal(error)
            is_of_run = is_of_run or "memory" in str(error) or "device" in str(error)
            if self.from_input or not is_tensor or is_of_run:
                raise
            return self  # so these are values of the layer
        # the model takes the tensor, but it also has the shape of the layer's output
        if self.from_input is None and is_tensor and self.values.shape[1:] == values.shape[1:]:
            raise HookError(
                f"values of {self} may be an input or the layer's output; say which by from_input="
            )
        return replace(self, values=values, from_input=False)

    def replacement(self, values: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The patch's values, for each sample of the batch."""
        new_values = self.values.to(values)
        return (
            values_for_batch(new_values, len(values), str(self))
            if new_values.ndim == values.ndim
            else new_values
        )


@dataclass(frozen=True, eq=False, repr=False)
class Ablate(Intervention):
    """Ablates the units of a layer: replaces their values by ones without information.

    Args:
        layer: see `Intervention`.
        by: "zero"; "mean", each channel's mean over the positions of its map, or over the
            ``reference``; "resample", values of other positions of the map drawn at random, or
            those of the ``reference``; or a baseline of `explain.baselines`, applied to the layer's
            map.
        reference: an input of the model to take other values from, of one image or of several,
            whose mean is taken.
        seed: of what "resample" draws.

    >>> from explain.hooks import intervene
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
        """Check the options."""
        super().__post_init__()
        if self.by not in ("zero", "mean", "resample") and not callable(self.by):
            raise HookError(
                f"by must be 'zero', 'mean', 'resample' or a baseline, got {self.by!r:.60}"
            )

    def bound(self, model: nn.Module) -> Intervention:
        """Run the model on the reference input, if there is one, and keep the layer's activations
        there."""
        if self.reference is None:
            return self
        return replace(
            self, reference=None, values=activations_of(model, self.layer, self.reference)
        )

    def replacement(self, values: torch.Tensor, axes: Axes) -> torch.Tensor:
        """Values without information, of the kind that ``by`` says: zeros, means, values of other
        positions, or a baseline's."""
        if self.by == "zero":
            return torch.zeros_like(values)
        if self.values is not None and not callable(self.by):
            reference = self.values.to(values)
            if self.by == "mean":
                return reference.mean([0, *axes.places], keepdim=True)
            image_index = torch.randint(len(reference), (1,), generator=seeded(self.seed))
            return reference[image_index.to(reference.device)]
        # without a reference, or by a baseline, the new values come from the layer's own map; of a
        # single position, a mean or another one would be the value itself
        position_dims = axes.places
        if not position_dims or math.prod(values.shape[dim] for dim in position_dims) < 2:
            raise HookError(
                f"{self} must be on a layer with positions, got one vector; give a reference"
            )
        if self.by == "mean":
            return values.mean(position_dims, keepdim=True)
        if self.by == "resample":
            return self._resampled(values, position_dims)
        if values.ndim < 4 or len(position_dims) < 2:
            raise HookError(
                f"{self} by a baseline must be on a map (N, C, H, W), got {tuple(values.shape)}"
            )
        maps = values.movedim(axes.channel_dim, 1)
        # a baseline takes (N, C, H, W), and a mask of what stays, which broadcasts
        keep_nothing = torch.zeros_like(maps[:1, :1])
        covered: torch.Tensor = self.by(maps, keep_nothing)
        return covered.to(values).movedim(1, axes.channel_dim)

    def _resampled(self, values: torch.Tensor, position_dims: Sequence[int]) -> torch.Tensor:
        """Values of positions, drawn at random with replacement, the same positions for all
        channels and images."""
        # all positions in one dimension, the last
        last_dims = list(range(values.ndim - len(position_dims), values.ndim))
        moved = values.movedim(list(position_dims), last_dims)
        flat = moved.flatten(last_dims[0])
        count = flat.shape[-1]
        chosen = torch.randint(count, (count,), generator=seeded(self.seed)).to(values.device)
        return flat[..., chosen].reshape(moved.shape).movedim(last_dims, list(position_dims))


@dataclass(frozen=True, eq=False, repr=False)
class Steer(Intervention):
    """Adds ``strength`` times a ``direction`` to the units of a layer.

    Args:
        layer: see `Intervention`.
        direction: ``(C,)``, along the channels, or a tensor that broadcasts to the layer's output.
        strength: by how much.

    >>> from explain.hooks import intervene
    >>> model = nn.Sequential(nn.Identity())
    >>> with intervene(model, [Steer("0", torch.tensor([1.0, 0.0]), 3)]):
    ...     model(torch.zeros(1, 2))
    tensor([[3., 0.]])
    """

    direction: Any = None
    strength: float = 1.0

    def replacement(self, values: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The layer's values plus ``strength`` times the direction, laid along the channels."""
        direction = torch.as_tensor(self.direction).to(values)
        if direction.ndim == 1:
            direction = direction.reshape(
                [-1 if dim == axes.channel_dim else 1 for dim in range(values.ndim)]
            )
        try:
            direction = direction.expand(values.shape)
        except RuntimeError:
            raise HookError(
                f"direction of {self} must have the layer's {values.shape[axes.channel_dim]} "
                f"channels, got {tuple(direction.shape)}"
            ) from None
        return values + self.strength * direction


@dataclass(frozen=True, eq=False, repr=False)
class Project(Intervention):
    """Takes directions out of a layer: its vectors along the channels lose what they have in the
    span of these.

    With ``towards`` ``(C,)``, their part in that span becomes that of this vector instead of zero,
    as of the mean over images without a concept (Anders et al., Finding and Removing Clever Hans,
    Information Fusion 2022).

    Args:
        layer: see `Intervention`.
        directions: ``(C,)`` or ``(K, C)``; they need not be orthogonal.
        strength: the share that is taken out, from 0 to 1.

    >>> from explain.hooks import intervene
    >>> model = nn.Sequential(nn.Identity())
    >>> with intervene(model, [Project("0", torch.tensor([2.0, 0.0]))]):
    ...     model(torch.tensor([[3.0, 4.0]]))
    tensor([[0., 4.]])
    """

    directions: Any = None
    strength: float = 1.0
    towards: Any = field(default=None, kw_only=True)

    def replacement(self, values: torch.Tensor, axes: Axes) -> torch.Tensor:
        """The layer's values without their part in the span of the directions.

        Almost parallel directions count as one.
        """
        # half precision would change the directions, and has no singular value decomposition
        wide_dtype = torch.promote_types(values.dtype, torch.float32)
        directions = torch.as_tensor(self.directions).to(values.device, wide_dtype)
        directions = directions.reshape(-1, directions.shape[-1])
        channels = values.shape[axes.channel_dim]
        if directions.shape[1] != channels or not directions.any():
            raise HookError(
                f"directions of {self} must have the layer's {channels} "
                f"channels and not be zero, got {tuple(directions.shape)}"
            )
        # an orthonormal basis of their span; divided first, so that their length plays no part
        _, singular_values, right_vectors = torch.linalg.svd(
            directions / directions.abs().max(), full_matrices=False
        )
        # as for the rank of a matrix: smaller ones are rounding errors of parallel directions
        rounding = torch.finfo(wide_dtype).eps * max(directions.shape)
        is_direction = singular_values > singular_values.max() * rounding
        basis = right_vectors[is_direction].to(values)
        vectors = values.movedim(axes.channel_dim, -1)
        # what is taken out is measured from zero, or from `towards`
        offsets = vectors
        if self.towards is not None:
            offsets = vectors - torch.as_tensor(self.towards).to(values)
        in_span = (offsets @ basis.T) @ basis
        projected: torch.Tensor = vectors - self.strength * in_span
        return projected.movedim(-1, axes.channel_dim)


@dataclass(frozen=True, eq=False, repr=False)
class Replace(Intervention):
    """Replaces what a layer gives by what a function or module makes of it, such as a sparse
    autoencoder.

    Args:
        layer: see `Intervention`.
        by: from the layer's output to what takes its place.
        name: what the module is called: its layers are then ``"LAYER/NAME"``,
            ``"LAYER/NAME.decoder"`` and so on, wherever a layer is named.

    >>> from explain.hooks import intervene
    >>> model = nn.Sequential(nn.Identity())
    >>> with intervene(model, [Replace("0", torch.neg)]):
    ...     model(torch.ones(1, 2))
    tensor([[-1., -1.]])
    """

    by: Any = None
    name: str = field(default="inserted", kw_only=True)

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not callable(self.by):
            raise HookError(f"by must be a function or a module, got {self.by!r:.60}")
        if not re.fullmatch(r"\w+", self.name):
            raise HookError(f"name must be a word without dots, got {self.name!r}")

    def replacement(self, values: torch.Tensor, axes: Axes) -> torch.Tensor:
        """What the function or module makes of the layer's values; of a tuple, the first tensor of
        their shape."""
        output = self.by(values)
        if isinstance(output, tuple):  # some autoencoders return their latents, too
            output = next(
                (part for part in output if getattr(part, "shape", None) == values.shape), output
            )
        if not isinstance(output, torch.Tensor):
            raise HookError(
                f"{self} must give a tensor of shape {tuple(values.shape)}, got "
                f"{type(output).__name__}"
            )
        return output


def activations_of(model: nn.Module, layer: str, x: Any) -> torch.Tensor:
    """Run a model on ``x``, and return the output of a layer (or the part that is named), as a copy
    without a graph. ``x`` is a tensor, a tuple of positional or a mapping of keyword arguments.
    """
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] = {}
    if isinstance(x, Mapping):
        kwargs = x
    else:
        args = x if isinstance(x, (tuple, list)) else (x,)
    with untouched(model), HookGroup(model) as group:
        calls = read_outputs(group, [layer], lambda tensor: tensor.detach().clone())[layer]
        model(*args, **kwargs)
    if len(calls) != 1:
        raise HookError(
            f"layer {layer!r} must run once to give values, but ran {len(calls)} times; name a "
            "call of it"
        )
    return calls[0]
