"""A method applied to its evidence: from the maps of each layer and call to one `Attribution`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from explain.attribution.diagnostics import warn_of_coverage
from explain.attribution.result import Attribution, Channels, finest_of, fused
from explain.data.inputs import InputLayout
from explain.engine import Evidence
from explain.engine.needs import applied
from explain.layers.placement import Placement, of_pixels
from explain.layers.stitched import Stitched
from explain.methods import Method
from explain.methods.base import Fusion, options, uses_layer

EvidenceOfCalls: TypeAlias = Mapping[str | None, Sequence[Evidence]]
"""The evidence by layer, with that of each of its calls that are meant."""


def apply_method(
    method: Method,
    model: nn.Module,
    evidence: EvidenceOfCalls,
    fuse: Fusion | None,
    layout: InputLayout | None,
    explained: str | None,
) -> Attribution:
    """The `Attribution` of a method's evidence at each layer, of which several are fused; maps of a
    `Stitched` model's windows are stitched first. Warns of operations without a rule.
    """
    first = first_of(evidence)
    stitched = model if isinstance(model, Stitched) and uses_layer(method) else None
    coverage = warn_of_coverage(method, first)
    maps: dict[Any, torch.Tensor] = {}
    placements: list[Placement | None] = []
    for layer, calls in evidence.items():
        placement = None if layer is None else calls[0].placement
        maps_of_calls = list(map(partial(applied, method), calls))
        maps[layer] = (
            maps_of_calls[0]
            if stitched is None
            else stitched.stitch_maps(maps_of_calls, first.size, placement)
        )
        placements.append(placement)
    layers = tuple(maps)
    values = maps[layers[0]]
    how = fuse or method.fusion or "mean"
    # one layer at each resolution: there is nothing to add up first
    if how == "stages" and len({layer_map.shape for layer_map in maps.values()}) == len(maps):
        how = "product"
    # a method that fuses scales a single map as well
    if len(layers) > 1 or method.fusion:
        all_maps = list(maps.values())
        located = [placement for placement in placements if placement is not None]
        # cells of branches that look elsewhere are added pixel by pixel
        if how == "sum" and any(located[0].lies_apart(placement) for placement in located[1:]):
            all_maps = [
                layer_map if looks is None else looks.in_pixels(layer_map[:, None])[:, 0]
                for layer_map, looks in zip(all_maps, placements, strict=True)
            ]
            placements = [of_pixels(first.size)] * len(placements)
        values = fused(all_maps, how, placements)
        placement = placements[finest_of(all_maps)]
    fields: dict[str, Any] = {}
    if len(layers) > 1:
        fields = {"maps": maps, "fuse": how}
    elif stitched is None:  # else ``first`` is the evidence of the first window alone
        ranked = method.channels(first)
        delta = method.delta(first, values)
        fields = dict(vars(method.outcome(first)))
        if ranked is not None:
            values_of_channels, indices = ranked.sort(dim=1, descending=True, stable=True)
            fields["channels"] = Channels(values_of_channels, indices)
        if delta is not None:
            fields["delta"] = delta.detach()
    frames_first = layout == "NTCHW" and values.ndim == 5
    attribution = Attribution(
        method=method.name,
        values=values.transpose(1, 2) if frames_first else values,
        target=first.target if first.classes is None else first.classes,
        score=first.score.detach(),
        layer=layers[0] if len(layers) == 1 else layers,
        size=first.size,
        style=method.style,
        options=options(method),
        logits=first.logits,
        input=explained,
        coverage=coverage,
        frames_first=frames_first,
        placement=placement,
        **fields,
    )
    return attribution.of_signals() if layout in ("NCL", "NLC") else attribution


def first_of(evidence: EvidenceOfCalls) -> Evidence:
    """The evidence of the first layer's first call, for what is the same at all layers: score,
    target and size."""
    return next(iter(evidence.values()))[0]
