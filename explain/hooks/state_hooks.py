"""Hooks on what is written to and read from a state dict, and on the steps of an optimizer."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as optimizers

from explain._utils.errors import HookError
from explain._utils.signals import unsplit
from explain.hooks.guard import Site, site_of
from explain.hooks.handles import Handle, Hook, Hooks
from explain.hooks.layer_names import Where
from explain.hooks.registration import OnModule


class StateHooks(Hooks):
    """The kinds of hooks on state dicts, of modules and optimizers, and on optimizers' steps.

    Like those on modules, they let the calls of other threads pass.
    """

    def state_dict_pre(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn(module, prefix, keep_vars)`` before a module writes its state; of an optimizer, ``fn(optimizer)``.

        A module writes its own part of a state dict, and its submodules write theirs: ``""`` is the whole model.
        """
        return self._on_state(where, fn, "state_dict_pre", ("module", "prefix", "keep_vars"), ("optimizer",))

    def state_dict(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn(module, state_dict, prefix, local_metadata)`` when a module has written its state.

        It may edit the state dict, and returns None. Of an optimizer, it is ``fn(optimizer, state_dict)``, and what it
        returns replaces the state dict.
        """
        takes = ("module", "state_dict", "prefix", "local_metadata")
        return self._on_state(where, fn, "state_dict_post", takes, ("optimizer", "state_dict"))

    def load_state_dict_pre(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn`` before a module reads its state, which it may edit.

        It takes ``(module, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)``. Of
        an optimizer, it is ``fn(optimizer, state_dict)``, and what it returns replaces the state dict.
        """
        takes = (
            "module", "state_dict", "prefix", "local_metadata", "strict", "missing_keys", "unexpected_keys",
            "error_msgs",
        )  # fmt: skip
        return self._on_state(where, fn, "load_state_dict_pre", takes, ("optimizer", "state_dict"))

    def load_state_dict(self, where: Where | Optimizer, fn: Hook) -> Handle:
        """Call ``fn(module, incompatible_keys)`` when a module has read its state; of an optimizer, ``fn(optimizer)``.

        It may edit the lists ``incompatible_keys.missing_keys`` and ``.unexpected_keys``.
        """
        return self._on_state(where, fn, "load_state_dict_post", ("module", "incompatible_keys"), ("optimizer",))

    def step_pre(self, optimizer: Optimizer, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` before each step; a pair that it returns replaces both."""
        return self._on_optimizer(optimizer, fn, "step_pre", ("optimizer", "args", "kwargs"))

    def step(self, optimizer: Optimizer, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` after each step."""
        return self._on_optimizer(optimizer, fn, "step_post", ("optimizer", "args", "kwargs"))

    def every_step_pre(self, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` before each step of every optimizer; a pair replaces both."""
        return self._on_every_step("before every step", fn, optimizers.register_optimizer_step_pre_hook)

    def every_step(self, fn: Hook) -> Handle:
        """Call ``fn(optimizer, args, kwargs)`` after each step of every optimizer."""
        return self._on_every_step("after every step", fn, optimizers.register_optimizer_step_post_hook)

    def _on_state(
        self, where: Where | Optimizer, fn: Hook, kind: str, of_module: tuple[str, ...], of_optimizer: tuple[str, ...]
    ) -> Handle:
        if isinstance(where, Optimizer):
            return self._on_optimizer(where, fn, kind, of_optimizer)
        modules, sites = self._on_modules(where, fn, _plain(kind), of_module)
        return self._at_once(sites, [getattr(module, f"register_{kind}_hook") for module in modules], fn)

    def _on_optimizer(self, optimizer: Optimizer, fn: Hook, kind: str, takes: tuple[str, ...]) -> Handle:
        if not isinstance(optimizer, Optimizer):
            raise HookError(
                f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}; every_step() is for all"
            )
        site = site_of(fn, type(optimizer).__name__, _plain(kind), takes)
        return self._at_once([site], [getattr(optimizer, f"register_{kind}_hook")], fn)

    def _on_every_step(self, direction: str, fn: Hook, register: Any) -> Handle:
        site = site_of(fn, "every optimizer", direction, ("optimizer", "args", "kwargs"))
        return self._at_once([site], [register], fn)

    @unsplit
    def _at_once(self, sites: list[Site], registers: list[Any], fn: Hook) -> Handle:
        """Register a hook on all its places, for calls of this group's thread."""
        handle = self._open(sites)
        for site, register in zip(sites, registers, strict=True):
            handle.place(register, OnModule(site, fn, self._thread))
        return handle


def _plain(kind: str) -> str:
    return kind.removesuffix("_post").replace("_", " ").replace(" pre", "-pre")
