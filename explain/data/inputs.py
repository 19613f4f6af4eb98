"""`Inputs`: what a model is called with, and which of it is explained."""

import inspect
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import nn

from explain._utils import nested
from explain._utils.errors import ExplainError, ImageError, python_or_command, shown
from explain._utils.modules import floating_parameter

Path: TypeAlias = tuple[int | str, ...]
InputLayout: TypeAlias = Literal["NCHW", "NHWC", "NTCHW", "NCTHW", "NTHWC", "NCL", "NLC"]
"""Where images, videos and signals have their channels: first, last, or behind the frames."""


COLOURS = (1, 3, 4)
"""How many channels photos have: in grey, in colours, with transparency."""
BRIGHT = 8.0
"""The mean of an input from which on it may hold levels from 0 to 255, which are not scaled."""
_OF_TENSORS = ("x", "other_tensors", "sizes", "_arguments")
"""The cached properties that are computed again where an argument's tensors are others."""


@dataclass(frozen=True, eq=False)
class Inputs:
    """The arguments of a model's forward; one or several of their tensors are explained, the others
    stay as they are.

    Of the others, a tensor with a value for each image goes with them: value i belongs to image i,
    unless it is said to be shared.

    Args:
        args: positional arguments; each may be a tensor, a container (tuple, list, mapping,
            dataclass) with tensors in it, or anything else, which is passed on as it is.
        kwargs: keyword arguments.
        explained: which is explained: the position or the keyword of an argument, or a path into
            containers such as ``(0, "image")``. None takes the first floating-point tensor ``(N, C,
            H, W)`` or ``(N, C, T, H, W)``. A list of these explains several inputs together; the
            first of them is the image that maps are laid over.
        shared: the arguments, named in the same ways, that belong to no single image, such as the
            texts that all images are compared with.
        layout: of explained inputs, "NHWC" where images have their channels last, as for Keras, and
            "NCHW" where they come first; of five dimensions, "NTCHW" where frames, tiles or the
            patches of a bag come before the channels, "NCTHW" where the channels come first, and
            "NTHWC" where they come last; None lets `explain.attribute` find it out. ``x`` and
            `tensor` have the channels first in each case, and the model gets them as it takes them.

    Raises:
        ImageError: none of the arguments fits, or they are not in a tuple and a mapping; or a
            layout of no input.

    >>> pair = Inputs(
    ...     (torch.rand(2, 3, 8, 8), torch.rand(2, 3, 8, 8)), {"weight": torch.rand(2)}, explained=1
    ... )
    >>> pair.name, len(pair)
    ('1', 2)
    """

    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    explained: int | str | Path | list[int | str | Path] | None = None
    shared: Collection[int | str | Path] = ()
    layout: InputLayout | None = None

    def __post_init__(self) -> None:
        """Check the arguments, and find the explained tensors: sets ``paths`` and ``path``, in the
        order in which ``explained`` names them."""
        if not isinstance(self.args, (tuple, list)) or not isinstance(
            self.kwargs, (Mapping, type(None))
        ):
            raise ImageError(
                "args must be a tuple of positional arguments, and kwargs a mapping, got "
                f"{type(self.args).__name__} and {type(self.kwargs).__name__}; write "
                "Inputs((a,), {'name': b})"
            )
        # the class is frozen
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "kwargs", dict(self.kwargs or {}))
        wanted = self.explained if isinstance(self.explained, list) else [self.explained]
        object.__setattr__(self, "paths", tuple(dict.fromkeys(map(self._find, wanted))))
        if not self.paths:
            raise ImageError(
                "explained must name at least one input tensor, got []; leave it out for the image"
            )
        object.__setattr__(self, "path", self.paths[0])
        if self.layout is None:
            return
        check_layout(self.layout)
        shapes = [tuple(self._tensors[path].shape) for path in self.paths]
        if all(len(shape) != len(self.layout) for shape in shapes):
            raise ImageError(
                f"layout must go with x of {len(self.layout)} dimensions, as {self.layout} is, got "
                f"shape {shapes[0]}; leave it out, or give x[:, None] for one frame each"
            )

    paths: tuple[Path, ...] = field(init=False)
    """Where the explained tensors are: the position or keyword of an argument, and the path from
    there."""

    path: Path = field(init=False)
    """Where the first explained tensor is."""

    _nudge: ClassVar[tuple[float, torch.Tensor] | None] = None
    """What explained tensors are multiplied by before a call, and what is added: see `nudged`."""

    @property
    def places(self) -> Sequence[Path | None]:
        """The explained tensors that evidence may be of; one alone goes without a name."""
        return self.paths if len(self.paths) > 1 else (None,)

    def __len__(self) -> int:
        return self.x.shape[0]

    def __repr__(self) -> str:
        tensors = (
            f"{dotted(path)} {tuple(tensor.shape)}" for path, tensor in self._tensors.items()
        )
        return (
            f"Inputs({', '.join(tensors)}, "
            f"explained={self.paths if len(self.paths) > 1 else self.path!r})"
        )

    @cached_property
    def x(self) -> torch.Tensor:
        """The tensor that is explained, ``(N, C, H, W)`` or ``(N, C, T, H, W)``, and ``(N, C, 1,
        L)`` of signals with their layout; of several, the first."""
        return self.tensor(self.path)

    def tensor(self, path: Path) -> torch.Tensor:
        """The tensor at a ``path`` in the arguments; an explained one with its channels before its
        frames, whatever the model takes."""
        return (
            self._tensors[path] if self.layout is None else self._turned(path, self._tensors[path])
        )

    @property
    def are_signals(self) -> bool:
        """Whether the explained input is known to be signals, which are images of one row here."""
        return self.layout in ("NCL", "NLC")

    @property
    def as_taken(self) -> bool:
        """Whether the model takes explained inputs as they are here: with their channels first, and
        no signals."""
        return self.layout is None or (self.layout.index("C") == 1 and not self.are_signals)

    def _turned(self, path: Path, tensor: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        """Bring the explained tensor at ``path`` from the model's layout into ours, with the
        channels first, or ``back``."""
        layout = self.layout or ""
        # only tensors with as many axes as the layout names
        is_laid_out = path in self.paths and self._tensors[path].ndim == len(layout)
        if self.as_taken or not is_laid_out:
            return tensor
        channels = layout.index("C")
        # signals are images of one row here
        if back:
            tensor = tensor.squeeze(2) if self.are_signals else tensor
            return tensor.movedim(1, channels)
        tensor = tensor.movedim(channels, 1)
        return tensor.unsqueeze(2) if self.are_signals else tensor

    @cached_property
    def name(self) -> str | None:
        """The path to the explained tensor, such as ``pixel_values``; None where it is all that the
        model takes."""
        return (
            None
            if self.path == (0,) and len(self.args) == 1 and not self.kwargs
            else dotted(self.path)
        )

    @cached_property
    def other_tensors(self) -> dict[Path, torch.Tensor]:
        """All tensors but the first explained one, by their paths."""
        tensors = dict(self._tensors)
        del tensors[self.path]
        return tensors

    @cached_property
    def constants(self) -> tuple[Any, ...]:
        """All arguments that are no tensors, such as switches, in order; part of the key under
        which a network's layers are remembered."""
        return tuple(nested.constants(self._arguments))

    def goes_with_images(self, path: Path) -> bool:
        """Whether the tensor at ``path`` has the images first, so that it is cut and repeated
        with the images; not for shared arguments."""
        tensor = self._tensors[path]
        if any(path[: len(start)] == start for start in map(_as_path, self.shared)):
            return False
        return tensor.ndim > 0 and len(tensor) == len(self)

    def split(
        self, explained: Mapping[Path, torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """All tensors, with the ``explained`` ones in the place of their own: those that have the
        images first, and others."""
        with_images: list[torch.Tensor] = []
        shared: list[torch.Tensor] = []
        for path, tensor in {**self._tensors, **explained}.items():
            (with_images if self.goes_with_images(path) else shared).append(tensor)
        return with_images, shared

    @cached_property
    def sizes(self) -> tuple[Any, ...]:
        """The path and the shape of each tensor, without the number of images where it has them
        first; part of the key under which a network's layers are remembered."""
        sizes = []
        for path, tensor in self._tensors.items():
            shape = tensor.shape[1:] if self.goes_with_images(path) else tensor.shape
            sizes.append((path, shape))
        return tuple(sizes)

    def rows(
        self, images: torch.Tensor, altered: Mapping[Path, torch.Tensor] | None = None
    ) -> "Inputs":
        """Return the inputs for P samples, of which sample i belongs to image ``images[i]``;
        explained tensors in ``altered`` ``(P, ...)`` take the place of copies. The engine makes
        batches of perturbed photos so."""
        tensors = self._for_model(altered or {})
        for path, tensor in self._tensors.items():
            if path not in tensors:
                tensors[path] = (
                    tensor[images.to(tensor.device)] if self.goes_with_images(path) else tensor
                )
        return self._with(tensors)

    def first(self) -> "Inputs":
        """Return the inputs for the first image alone."""
        return self.rows(torch.zeros(1, dtype=torch.long, device="cpu")) if len(self) > 1 else self

    def replaced(self, new: torch.Tensor | Mapping[Path, torch.Tensor]) -> "Inputs":
        """Return the inputs with explained tensors replaced, by their paths; a single tensor
        ``new`` replaces the first explained one. Channels come first in them."""
        replacements = {self.path: new} if isinstance(new, torch.Tensor) else new
        return self._with({**self._tensors, **self._for_model(replacements)})

    def _for_model(self, tensors: Mapping[Path, torch.Tensor]) -> dict[Path, torch.Tensor]:
        """Bring explained tensors, by path, from our layout into the one that the model takes;
        turned ones are made contiguous, since the model may use ``view`` on them."""
        if self.layout is None or self.as_taken:
            return dict(tensors)
        return {
            path: self._turned(path, new, back=True).contiguous() for path, new in tensors.items()
        }

    def in_single_precision(self) -> "Inputs":
        """Return the inputs with tensors of half precision in float32."""
        halves = (torch.float16, torch.bfloat16)
        tensors = self._tensors.items()
        return self._with(
            {path: tensor.float() if tensor.dtype in halves else tensor for path, tensor in tensors}
        )

    def detached(self) -> "Inputs":
        """Return the inputs without the caller's graph."""
        if not any(map(attrgetter("requires_grad"), self._tensors.values())):
            return self
        return self._with({path: tensor.detach() for path, tensor in self._tensors.items()})

    def copied(self) -> "Inputs":
        """Return the inputs with all tensors copied, since a model that works on its input in place
        must not reach the caller's tensors.

        One image alone is laid out with its channels first, as most networks take it, however it
        was read.
        """
        copies = {}
        for path, tensor in self._tensors.items():
            is_alone = _is_image(tensor) and tensor.shape[0] == 1
            memory_format = torch.contiguous_format if is_alone else torch.preserve_format
            copies[path] = tensor.clone(memory_format=memory_format)
        if self._nudge is not None:
            scale, shift = self._nudge
            for path in self.paths:
                copies[path] = scale * copies[path] + shift
        return self._with(copies)

    def nudged(self, scale: float, share: float) -> "Inputs":
        """Return the same inputs, of which the model gets the explained ones times ``scale`` and
        plus a ``share`` of the largest value of all, altered images too; what it gives is taken
        times ``scale``."""
        changed = self._with(self._tensors)
        vars(changed)["_nudge"] = scale, share * self.x.detach().abs().amax()
        return changed

    def call(self, model: nn.Module) -> Any:
        """Call the model on copies of all tensors, and return its output. Errors of torch that the
        input explains are raised as an error of this package, or get a note.

        Raises:
            ImageError: torch refuses the input, since it has another precision, or other channels,
                than the weights.
            Exception: anything else that the model raises.
        """
        copies = self.copied()
        try:
            output = model(*copies.args, **copies.kwargs)
            if self._nudge is None:
                return output
            scale, _ = self._nudge
            return nested.replace(
                output,
                lambda path, tensor: scale * tensor if tensor.is_floating_point() else tensor,
            )
        except ExplainError:
            raise
        except Exception as error:
            missing_inputs = self._unnamed(model)
            if missing_inputs is not None and isinstance(
                error, (AttributeError, TypeError, ValueError)
            ):
                raise ImageError(missing_inputs) from error
            name = "x" if self.name is None else f"input {self.name}"
            for refusal, explanation in _misfits(model, self.x, name):
                if type(error) is RuntimeError and refusal.search(str(error)):
                    raise ImageError(explanation) from error
                # it need not be the reason: the error stays, and the note helps
                error.add_note(f"explain: {explanation}")
            raise

    def _unnamed(self, model: nn.Module) -> str | None:
        """The message for a failed call whose model lacks other arguments, or whose first argument
        is no image; None where neither is so.
        """
        parameters = inspect.signature(model.forward).parameters
        names = [*parameters]
        name = type(model).__name__
        if self.path == (0,) and "pixel_values" in names and names[0] != "pixel_values":
            remedy = f'use explain.Inputs(kwargs={{"pixel_values": x, "{names[0]}": ...}})'
            return (
                f"x must be given by name to {name}, whose first argument is {names[0]}; {remedy}"
            )
        # kinds are ordered: before *args come those that may be given by position
        positional = [one for one in parameters.values() if one.kind < one.VAR_POSITIONAL]
        required = [one.name for one in positional if one.default is one.empty]
        missing = ", ".join(key for key in required[len(self.args) :] if key not in self.kwargs)
        if not missing:
            return None
        return (
            f"x must come with the other inputs of {name} ({missing}); use explain.attribute(model,"
            f" (x, {missing}), ...), or for photos a module that adds them"
        )

    @cached_property
    def _arguments(self) -> dict[Any, Any]:
        return {**dict(enumerate(self.args)), **self.kwargs}

    @cached_property
    def _tensors(self) -> dict[Path, torch.Tensor]:
        """All tensors of the arguments, by their paths, positional arguments first; those inside of
        containers too."""
        return dict(nested.paths(self._arguments))

    def _with(self, tensors: dict[Path, torch.Tensor]) -> "Inputs":
        """Return inputs with the same arguments but other ``tensors``, which must have the same
        paths. Nothing is checked or found again: what was cached stays, but for `_OF_TENSORS`."""
        arguments = {**self._arguments}
        if max(map(len, tensors)) > 1:  # some are in containers
            arguments = nested.replace(arguments, lambda path, _: tensors[path])
        else:
            for path, tensor in tensors.items():
                arguments[path[0]] = tensor
        args = tuple(map(arguments.pop, range(len(self.args))))  # keyword arguments are left
        changed = object.__new__(Inputs)
        vars(changed).update(vars(self), args=args, kwargs=arguments, _tensors=tensors)
        for name in _OF_TENSORS:
            vars(changed).pop(name, None)
        return changed

    def _find(self, wanted: int | str | Path | None) -> Path:
        """The path of the explained tensor in ``wanted``: the first image ``(N, C, H, W)`` or ``(N,
        C, T, H, W)``, else the first floating-point tensor, else the first; refused without.
        """
        wanted_path = () if wanted is None else _as_path(wanted)  # where every path begins
        best: Path | None = None
        best_rank = -1
        for path, tensor in self._tensors.items():
            # 2 for an image, 1 for other floats, 0 for the rest; of one rank, the first is taken
            rank = 2 if _is_image(tensor) else int(tensor.is_floating_point())
            if path[: len(wanted_path)] == wanted_path and rank > best_rank:
                best = path
                best_rank = rank
        if best is not None:
            return best
        if wanted is not None:
            names = ", ".join(map(dotted, self._tensors)) or "none"
            raise ImageError(
                f"explained must name one of the input tensors ({names}), got {wanted!r}"
            )
        # there is no tensor at all
        kinds = [type(value).__name__ for value in self._arguments.values()]
        got = ", ".join(kinds) or "nothing"
        remedy = "use explainer.preprocess(image)[None]"
        if any(isinstance(value, np.ndarray) for value in self._arguments.values()):
            remedy = "use torch.from_numpy(x)"
        elif any(hasattr(value, "dataset") for value in self._arguments.values()):  # a DataLoader
            remedy = (
                "use explain.run(x.dataset, explainer, methods), or explain each of its batches"
            )
        raise ImageError(f"x must be a tensor (N, C, H, W), got {got}; {remedy}")


def check_layout(layout: Any) -> InputLayout | None:
    """Return a caller's ``layout`` of inputs, or None; refused if there is none of this name."""
    choices = get_args(InputLayout)
    if layout is not None and layout not in choices:
        raise ImageError(
            f"layout must be one of {', '.join(choices)}, got {shown(layout)}; leave it out"
        )
    return layout  # type: ignore[no-any-return]


InputsLike: TypeAlias = torch.Tensor | tuple[Any, ...] | list[Any] | Mapping[str, Any] | Inputs


def as_inputs(x: InputsLike) -> Inputs:
    """Take a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.

    >>> as_inputs({"pixel_values": torch.rand(1, 3, 8, 8), "interpolate": True}).name
    'pixel_values'
    """
    if isinstance(x, Inputs):
        return x
    if isinstance(x, Mapping):
        return Inputs(kwargs=x)
    return Inputs(tuple(x) if isinstance(x, (tuple, list)) else (x,))


def check_dimensions(model: nn.Module, x: torch.Tensor, name: str) -> None:
    """Refuse an input (``name`` in messages) that is no batch of images, videos or volumes; nor of
    signals, for a network without convolutions of images."""
    if x.ndim in (4, 5):
        return
    _, first = first_convolution(model)
    if x.ndim == 3 and first is None:
        return
    remedy = "use explainer.preprocess(image)[None]"
    if x.ndim == 2:
        remedy = "for signals of one channel, give x[:, None] to a module that takes x[:, 0] of it"
    elif x.ndim == 3 and first is not None:
        remedy = "for signals or sequences, pass layout='NCL' or 'NLC'"
        if x.shape[0] == first.in_channels:
            remedy = "add the batch dimension with x[None]"
        elif x.shape[-1] == first.in_channels:
            remedy = "put the channels first with x.permute(2, 0, 1)[None]"
    raise ImageError(f"{name} must have the shape (N, C, H, W), got {tuple(x.shape)}; {remedy}")


def first_convolution(model: nn.Module) -> tuple[str, nn.Conv2d | nn.Conv3d | None]:
    """The first plain convolution in two or three dimensions, with its name; None without one."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Conv3d)):
            return name, module
    return "", None


# What torch says where an input has another precision than weights, or other dimensions, or other
# channels.
_PRECISION = re.compile(
    r"same dtype|scalar type|Input type \(.*\) and (weight|bias) type|mixed dtype"
)
_DIMENSIONS = re.compile(
    r"Expected \dD .* input to conv\dd, but got input of size|Output size is too small"
)
_CHANNELS = re.compile(r"to have \d+ channels, but got \d+ channels instead")


_REMEDIES = {
    1: "use x.expand(-1, 3, *x.shape[2:]) for photos in grey",
    4: "leave out transparency with x[:, :3]",
}
"""What to do with photos of so many channels, for a model of colours."""


def _misfits(model: nn.Module, x: torch.Tensor, name: str) -> Iterator[tuple[re.Pattern[str], str]]:
    """Yield what does not fit between the input ``x`` and the model that has just failed on it: a
    pattern of torch's message for it, and a message of ours, in which the input is called ``name``.
    """
    weight = floating_parameter(model)
    if weight is not None and weight.dtype != x.dtype:
        message = f"{name} must be {weight.dtype} as the weights are, got {x.dtype}"
        yield _PRECISION, f"{message}; use x.to({weight.dtype})"
    layer, first = first_convolution(model)
    if first is None:
        return
    dims = len(first.kernel_size) + 2
    if x.ndim != dims:
        yield (
            _DIMENSIONS,
            f"{name} must have {dims} dimensions for the model's first convolution ({layer}), got "
            f"{x.ndim}; give photos as (N, C, H, W), volumes and videos as (N, C, T, H, W)",
        )
    elif x.shape[1] != first.in_channels:
        remedy = python_or_command(
            "use a preprocess= with as many", "give the model a preprocess of its own"
        )
        if first.in_channels == 3:
            remedy = _REMEDIES.get(x.shape[1], remedy)
        if x.shape[-1] == first.in_channels:
            remedy = "put the channels first with x.movedim(-1, 1)"
        yield (
            _CHANNELS,
            f"{name} must have the channels of the model's first convolution ({layer}), "
            f"{first.in_channels}, got {x.shape[1]}; {remedy}",
        )


def dotted(path: Path) -> str:
    """Name the path to a tensor, as in ``0.image``."""
    return ".".join(map(str, path))


def _as_path(path: int | str | Path) -> Path:
    return path if isinstance(path, tuple) else (path,)


def _is_image(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.ndim in (4, 5)
