"""Options that would have no effect with the methods that were typed are refused."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from explain.arguments import UsageError

if TYPE_CHECKING:
    from explain.methods import Method


def refuse_without_effect(options: argparse.Namespace, methods: Sequence[Method]) -> None:
    """Refuse the first option that none of these methods heeds.

    Raises:
        UsageError: there is one.
    """
    from explain.methods import LRP, ManyLayers, Movable, uses_layer
    from explain.methods import options as options_of
    from explain.render import get_style

    names = ", ".join(method.name for method in methods)
    own = [get_style(options.style or method.style) for method in methods]
    several = len(options.layer or ()) > 1 or any(re.search(r"[*?\[]", layer) for layer in options.layer or ())
    fuses = several or (not options.layer and any(isinstance(method, ManyLayers) for method in methods))
    heeded = {
        "layer": (
            any(uses_layer(m) or isinstance(m, Movable) for m in methods),
            f"no layer is looked at for {names}",
        ),
        "composite": (
            any(isinstance(m, LRP) and m.composite == options.composite for m in methods),
            f"the rules of {names} are chosen already"
            if any(isinstance(m, LRP) for m in methods)
            else f"no rules are chosen for {names}",
        ),
        "fuse": (fuses, "the maps of one layer are not fused; name several with --layer"),
        "batch_size": (
            bool(options.metric or getattr(options, "check", False)) or any(map(_reruns, methods)),
            f"the model is run once for {names}",
        ),
        **{
            option: (any(option in options_of(m) for m in methods), f"nothing is estimated by {names}")
            for option in ("runs", "until", "seconds")
        },
        "bf16": (any(map(_reruns, methods)), f"the model is run once for {names}"),
        "alpha": (any(hasattr(style, "alpha") for style in own), "nothing is drawn as heat"),
        "colormap": (
            bool(options.style) or any(hasattr(style, "colormap") for style in own),
            "nothing is drawn with a colour map",
        ),
    }
    for name, (is_heeded, reason) in heeded.items():
        if name in options.given and not is_heeded:
            raise UsageError(f"--{name.replace('_', '-')} would have no effect: {reason}; leave it out")


def _reruns(method: Method) -> bool:
    """Whether a method runs the model on more than the photo itself."""
    from explain.engine import Attributions, Reruns, Scores

    return any(isinstance(need, (Attributions, Reruns, Scores)) for need in method.needs)
