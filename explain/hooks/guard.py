"""The checks around every hook: it must fit its place, may not edit gradients, and is named when it
fails."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from explain._utils import nested
from explain._utils.errors import ExplainError, HookError, raised
from explain._utils.signals import came_by_signal
from explain.hooks.handles import Handle
from explain.recording.modes import Watcher


class Edits:
    """Tells whether gradients are edited in place."""

    def __init__(self, gradients: Sequence[torch.Tensor]) -> None:
        """Note the versions of the gradients, which in-place edits raise."""
        self._gradients = gradients
        self._versions = [gradient._version for gradient in gradients]
        self._copies: list[torch.Tensor] = []
        """Made when something asks for the memory of a tensor, past autograd."""

    def watched(self, name: str, tensor: torch.Tensor) -> None:
        """Copy the gradients before the first call that may write to memory without autograd's
        counter."""
        if not self._copies:
            self._copies = [gradient.detach().clone() for gradient in self._gradients]

    def any(self) -> bool:
        """Whether one of the watched gradients has been changed in place since the block began."""
        if [gradient._version for gradient in self._gradients] != self._versions:
            return True
        pairs = zip(self._gradients, self._copies, strict=False)
        return any(not _same(gradient, copy) for gradient, copy in pairs)


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a tensor has the values of its copy, NaN included; sparse tensors count as
    unchanged."""
    if tensor.layout != torch.strided:
        return True
    is_same_type = tensor.shape == copy.shape and tensor.dtype == copy.dtype
    return is_same_type and torch.allclose(tensor, copy, rtol=0, atol=0, equal_nan=True)


def name_of_function(fn: Any) -> str:
    """The name of the function inside a hook, as messages show it; of a partial, that of its
    function."""
    function = _without_partial(fn)
    return str(getattr(function, "__name__", type(function).__name__))


def is_ours(fn: Any) -> bool:
    """Whether a hook function belongs to this package: then it is not checked, and need not
    fire."""
    return str(getattr(_without_partial(fn), "__module__", "")).startswith("explain.")


def _without_partial(fn: Any) -> Any:
    """The function inside (nested) `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return fn


EVERY_MODULE = "every module"
"""Where a hook is that is called for whatever runs."""


class Hook:
    """A caller's function on one place: it is named when it raises, and knows whether it has fired.
    A hook that registers another one may return its handle, which counts as None."""

    why_unfired = "no gradient came to it; keep the group open until the backward pass is done"
    """Why it may not have fired."""

    def __init__(self, fn: Callable[..., Any], where: str, direction: str) -> None:
        """Keep a caller's hook function ``fn``, and what messages call its place (``where``) and
        direction."""
        self.fn = fn
        self.where = where
        self.direction = direction
        self.name = name_of_function(fn)
        self.fired = False
        self._last_module = ""
        """Of a hook on every module, the kind of module that it was called for last."""

    def __str__(self) -> str:
        return f"hook {self.name!r} on {self.where}{self._last_module} ({self.direction})"

    def must_take(self, arguments: Sequence[str]) -> None:
        """Check that the function can be called with these arguments (names that the message
        shows)."""
        if not callable(self.fn):
            raise HookError(f"{self} must be callable, got {self.fn!r}; pass the function itself")
        try:
            signature = inspect.signature(self.fn)
        except ValueError:  # some built-ins have no signature
            return
        try:
            signature.bind(*arguments)  # the names stand for arguments: only their number matters
        except TypeError:
            takes = ", ".join(arguments)
            raise HookError(
                f"{self} must take ({takes}), but its signature is {signature}; change it"
            ) from None

    def __call__(self, *arguments: Any) -> Any:
        """Call the function and note that it fired; an exception becomes a `HookError` that names
        the hook."""
        self.fired = True
        if self.where == EVERY_MODULE:
            self._last_module = f", here a {type(arguments[0]).__name__}"
        try:
            result = self.fn(*arguments)
        except ExplainError:  # says itself what is wrong
            raise
        except Exception as error:
            if came_by_signal(error):  # an interrupt, of which the hook is not the cause
                raise
            raise HookError(f"{self} {raised(error)}") from error
        return None if isinstance(result, Handle) else result


class ForwardHook(Hook):
    """One in a forward pass: those of its own tensors that it returns are copied, since the pass
    may overwrite them."""

    why_unfired = (
        "the layer did not run after the hook was registered, or did so in another thread, "
        "or the module that it is in left it out (as nn.MultiheadAttention)"
    )

    def __call__(self, *arguments: Any) -> Any:
        """Call a forward hook; tensors of its own that it returns are copied, since the pass may
        overwrite them in place."""
        result = super().__call__(*arguments)
        if result is None:
            return None
        of_the_pass = {id(tensor) for _, tensor in nested.paths(arguments)}
        # a container of the pass stays the same object; one of the hook's own is not written to
        is_of_the_pass = any(result is argument for argument in arguments)
        change = nested.edit if is_of_the_pass else nested.replace
        return change(
            result, lambda path, tensor: tensor if id(tensor) in of_the_pass else tensor.clone()
        )


class GradientHook(Hook):
    """A hook on gradients, of a tensor, a Node or a module: what it returns replaces the first
    gradients it is given. Raises HookError if it edits one, or returns what does not fit."""

    def __call__(self, *arguments: Any) -> Any:
        """Call a hook on gradients, and check that it edited none in place and returned the right
        shapes. What it returns replaces its first gradients, as a tuple if several."""
        # a hook on a module is given the module first
        gradients_given = arguments[1:] if isinstance(arguments[0], nn.Module) else arguments
        edits = Edits([gradient for _, gradient in nested.paths(gradients_given)])
        with Watcher(edits.watched):  # tells when memory is asked for, such as by `numpy()`
            result = super().__call__(*arguments)
        if edits.any():
            raise HookError(
                f"{self} edited its gradient in place, which other branches may share; return a "
                "new tensor"
            )
        if result is None:
            return None
        replaced = gradients_given[0]
        if isinstance(replaced, (tuple, list)) and isinstance(result, torch.Tensor):
            result = (result,)  # a hook may return a single gradient without a tuple
        expected = _layout(replaced)
        layout = _layout(result)
        if not _fits(layout, expected):
            raise HookError(
                f"{self} must return None or gradients of the shape that it was given, "
                f"{expected}, got {layout}"
            )
        return tuple(result) if isinstance(result, list) else result


class ModuleGradientHook(GradientHook):
    """One on the gradients of a module."""

    why_unfired = (
        "its layer did not run after it was registered; register it before the forward pass"
    )


def _fits(layout: Any, expected: Any) -> bool:
    """Whether gradients that a hook returned can replace those it was given, by their layouts (see
    `_layout`): as many, of the same shapes; each may be None."""
    if not isinstance(layout, list) or not isinstance(expected, list):
        return bool(layout == expected)
    if len(layout) != len(expected):
        return False
    return all(new in (None, old) for new, old in zip(layout, expected, strict=True))


def _layout(gradients: Any) -> Any:
    """The shapes of gradients, nested as they are: a tuple for a tensor, a list for several, None,
    or a type's name for anything else."""
    if isinstance(gradients, torch.Tensor):
        return tuple(gradients.shape)
    if isinstance(gradients, (tuple, list)):
        return [_layout(gradient) for gradient in gradients]
    return None if gradients is None else type(gradients).__name__
