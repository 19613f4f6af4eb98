"""`trace`: the effect of patching each part of a network from one photo into another, and its fast
estimate."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any, get_args

import torch
from torch import nn

from explain._utils.errors import HookError, LayerError, check_choice, keywords
from explain._utils.modules import submodule
from explain._utils.nested import first_tensor, replace_first
from explain.attribution.effects import At, Effects
from explain.data.inputs import Inputs, as_inputs
from explain.engine.blocks import attention_layers
from explain.engine.execution import gather
from explain.engine.needs import Evidence, NeedAtLayer
from explain.engine.output_kinds import OutputReader
from explain.engine.perturbations import Perturbation, PerturbedRows, Scores, samples_of
from explain.engine.plan import Plan
from explain.engine.settings import Progress, RuntimeSettings
from explain.hooks import HookGroup, Intervention, capture, preserve
from explain.hooks.capturing import Capture
from explain.hooks.layer_names import (
    LayerPlace,
    Where,
    find_places,
    name_of_call,
    place_of,
    select_places,
)
from explain.hooks.units import Axes
from explain.hooks.unwrap import unwrapped
from explain.layers import default_layer
from explain.layers.frames import with_layout
from explain.layers.grids import PhotoGrids
from explain.layers.layouts import frames_in_batch
from explain.layers.summary import summary_of
from explain.targets import labels, resolve

REGIONS = 7
"""Regions are the squares of a grid of so many rows and columns."""


@dataclass(frozen=True, eq=False)
class _Patches(Perturbation):
    """The corrupted photo, once for each patch; ``numbers`` has the patches of the copies that run
    now, which the hooks of the sites read.
    """

    total: int
    # in a list, as fields are frozen: the only entry is replaced for each batch
    numbers: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(0, dtype=torch.long)])

    is_by_hooks = True
    words = "the photo with one part patched"

    def rows(self, evidence: Evidence) -> PerturbedRows:
        """One copy of the corrupted photo for each patch, built in batches; each batch notes the
        numbers of its patches for the hooks, before the network runs.
        """
        x = evidence.inputs

        def build(images: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            self.numbers[0] = numbers
            return x.expand((len(numbers), *x.shape[1:])).clone()

        return samples_of([self.total], x.device, build)


@dataclass(frozen=True, eq=False)
class _Site:
    """A place that is patched: its clean values, and the mask of each of its units, which
    broadcasts to them."""

    name: str
    clean: torch.Tensor
    masks: torch.Tensor
    first: int
    """The number of its first patch."""
    of_images: int
    """The dimension that images are in; in the clean values and masks it is the first."""
    estimates: torch.Tensor
    """What attribution patching says of each unit."""
    grid: tuple[int, int] | None
    """The rows and columns of the units, where they are places of the photo."""

    @property
    def end(self) -> int:
        """The number after that of its last patch."""
        return self.first + len(self.masks)

    def hook(self, patches: _Patches) -> Callable[[nn.Module, Any, Any], Any]:
        """The forward hook of activation patching: in copies ``(b, ...)`` that are patches of this
        place, a unit gets its clean values. Other copies stay.
        """

        def put_clean_values(module: nn.Module, args: Any, output: Any) -> Any:
            """Put the clean values of each copy's unit into the layer's output; None, which leaves
            it, if no copy is of this place.
            """
            tensor = first_tensor(output)
            if tensor is None:
                return None
            values = tensor.movedim(self.of_images, 0)
            # negative, or beyond the last, for copies that are patches of another place
            units = patches.numbers[0].cpu()[: len(values)] - self.first
            patched_samples = ((units >= 0) & (units < len(self.masks))).nonzero()[:, 0]
            if not len(patched_samples):
                return None
            patched = values.clone()
            patched[patched_samples] = torch.where(
                self.masks[units[patched_samples]], self.clean, values[patched_samples]
            )
            return replace_first(output, patched.movedim(0, self.of_images))

        return put_clean_values


@keywords()
def trace(
    model: nn.Module,
    clean: Any,
    corrupted: Any,
    at: At = "layers",
    *,
    layers: Where | None = None,
    target: resolve.TargetLike = None,
    categories: Sequence[str] | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Effects:
    """Patch each part of a network from a clean run into a corrupted one, and measure the change of
    the score.

    It shows which components explain the difference of the two scores. All patches run in batches.
    The estimate of attribution patching (Nanda 2023; Syed et al. 2023) takes one backward pass;
    `Effects.correlation` says how well it does.

    Args:
        model: any module.
        clean: the photo ``(1, C, H, W)`` that values are taken from.
        corrupted: the photo, of the same shape, that they are put into.
        at: "layers" patches what layers give, such as the branches of residual blocks, "channels"
            each channel, "heads" each head of attention, "tokens" each token, "positions" each
            place of the layers' maps, and "regions" squares of the photo, 7 × 7.
        layers: which layers; by default the blocks of the network, with "layers" what is inside
            them, with "channels" the last feature map, and with "heads" all attentions.
            ``"blocks.3.attn:q"`` is a part of an attention.
        target: the score, as for `explain.attribute`; None is the clean photo's top class.
        categories, batch_size, progress: as for `explain.attribute`.

    Raises:
        ExplainError: the photos differ in shape, or a layer has no such units.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    >>> effects = trace(
    ...     model, torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), "channels", layers="0", target=1
    ... )
    >>> [(row["layer"], row["unit"]) for row in effects.rows()]
    [('0', 0), ('0', 1)]
    """
    check_choice("at", at, get_args(At), error=HookError)
    model = unwrapped(model)
    clean_inputs = with_layout(model, clean).detached()
    corrupted_inputs = replace(as_inputs(corrupted).detached(), layout=clean_inputs.layout)
    if len(clean_inputs) != 1 or clean_inputs.x.shape != corrupted_inputs.x.shape:
        raise HookError(
            "clean and corrupted must be one image each, of the same shape, got "
            f"{tuple(clean_inputs.x.shape)} and {tuple(corrupted_inputs.x.shape)}"
        )
    names = (
        select_places(model, layers) if layers is not None else _default(model, clean_inputs, at)
    )
    without_units = LayerError(f"model must have {at} to be traced, got none; name the layers")
    if not names:
        raise without_units
    if at == "heads":  # of an attention that is named as a whole, all its heads
        names = [name if find_places(model, name)[name].part else f"{name}:heads" for name in names]
    class_count = None if categories is None else len(categories)
    reader = OutputReader(model, clean_inputs, activation=None, classes=class_count)
    with preserve.untouched(model), reader:
        with torch.no_grad(), capture(model, names, gradients=False) as clean_pass:
            output = clean_inputs.call(model)
        resolved = (
            resolve.as_target(target, categories)
            .for_input_size(tuple(clean_inputs.x.shape[2:]))
            .resolved(output, 1)
        )
        picked_score, classes = resolved.pick(output, 1)[:2]
        clean_score = picked_score.clone()  # the next pass may overwrite the model's answer
        x = corrupted_inputs.x.clone().requires_grad_()
        with torch.enable_grad(), capture(model, names) as corrupted_pass:
            corrupted_output = corrupted_inputs.replaced(x).call(model)
            (corrupted_score,) = resolved.pick(corrupted_output, 1)[0]  # of one image
        corrupted_pass.backward(corrupted_score, roughly=True)  # as it is for estimates alone
    find_sites = _SiteFinder(
        model, clean_inputs, at, clean_pass, corrupted_pass, named=layers is not None
    )
    sites = find_sites(names)
    if not sites:
        raise without_units
    patches = _Patches(sites[-1].end)
    with HookGroup(model) as group, reader:
        for site in sites:
            group.forward(site.name, site.hook(patches))
        plan = Plan({"trace": frozenset({NeedAtLayer(Scores(patches), None)})})
        settings = RuntimeSettings(batch_size, progress=progress)
        (lookup,) = gather(model, corrupted_inputs, plan, [resolved], settings)
    effects = lookup(None)[Scores(patches)].cpu() - corrupted_score.detach().cpu()
    return Effects(
        at,
        by_layer={site.name: effects[site.first : site.end] for site in sites},
        estimates={site.name: site.estimates for site in sites},
        clean=float(clean_score),
        corrupted=float(corrupted_score.detach()),
        target=resolved.name
        if classes is None
        else labels.class_label(categories, int(classes[0])),
        grid={site.name: site.grid for site in sites if site.grid is not None},
        photo=_in_grey(clean_inputs.x) if clean_inputs.x.ndim == 4 else None,
    )


def _in_grey(x: torch.Tensor) -> torch.Tensor:
    """The clean photo in grey for the figure, ``(H, W)`` from 0 to 1.
    Scaled from its darkest to its brightest place, whatever the preprocessing was.
    """
    grey = x[0].detach().float().mean(0).cpu()
    return (grey - grey.amin()) / (grey.amax() - grey.amin()).clamp(min=1e-12)


@dataclass(frozen=True, eq=False)
class _SiteFinder:
    """Makes the sites of layers that were captured in both passes; those that were ``named`` must
    have units."""

    model: nn.Module
    inputs: Inputs
    at: At
    clean: Capture
    corrupted: Capture
    named: bool

    @cached_property
    def _grids(self) -> PhotoGrids:
        """How what layers give lies on the photo."""
        return PhotoGrids(self.model, self.inputs)

    def __call__(self, names: Sequence[str]) -> list[_Site]:
        """The places to be patched in these layers, numbered one after the other, in the order of
        the patches. Layers without such units are left out, unless the caller named them.
        """
        sites: list[_Site] = []
        for name in names:
            try:
                site = self._site(name, sites[-1].end if sites else 0)
            except HookError:
                if self.named:
                    raise
                continue  # a layer without such units, of those by default
            if site is not None:
                sites.append(site)
        return sites

    def _site(self, name: str, first_patch: int) -> _Site | None:
        """The place to be patched in a layer, with estimates: the change of values times gradient,
        summed over each unit. None if the layer is unused, or has a video's frames as samples.
        """
        record = self.clean.of(name)
        corrupted = self.corrupted.of(name)
        if record is None or corrupted is None:
            return None
        shape = tuple(record.activation.shape)
        frames = frames_in_batch(shape, tuple(self.inputs.x.shape[2:]))
        if frames and frames > 1:
            must = (
                f"layer {name!r} must give one output for an image, got {frames}, its frames; name "
                "another"
            )
            if self.named:
                raise LayerError(must)
            return None
        place = find_places(self.model, name)[name]
        # of tokens, images may be in the second dimension
        grid = self._grids(place, shape) if len(shape) == 3 else None
        image_dim = 0 if grid is None else grid.of_images
        clean = record.activation.movedim(image_dim, 0)
        masks, rows_and_columns = self._masks(name, place, clean)
        change = record.activation - corrupted.activation
        gradient = torch.zeros_like(change) if corrupted.gradient is None else corrupted.gradient
        products = (change * gradient).movedim(image_dim, 0)[0]
        estimates = torch.stack([(products * mask).sum() for mask in masks]).cpu()
        # of several calls, the last one was captured, and a hook must act on that one alone
        calls = sum(call_record.layer == record.layer for call_record in self.clean.records)
        is_named_call = calls == 1 or place_of(name, self.model).call is not None
        call_name = name if is_named_call else name_of_call(name, calls - 1, self.model)
        return _Site(
            call_name,
            clean=clean,
            masks=masks,
            first=first_patch,
            of_images=image_dim,
            estimates=estimates,
            grid=rows_and_columns,
        )

    def _masks(
        self, name: str, place: LayerPlace, values: torch.Tensor
    ) -> tuple[torch.Tensor, tuple[int, int] | None]:
        """The mask of each unit of a layer ``(units, ...)``, which broadcasts to ``values`` (its
        clean output, images first), and the rows and columns if these are places of the photo.
        """
        if self.at == "layers":
            return torch.ones([1] * values.ndim, dtype=torch.bool, device=values.device), None
        size = tuple(self.inputs.x.shape[2:])
        axes = Axes(values, place, name, size=size, find_grids=lambda: self._grids)

        def masks_of(field_name: str, units: Iterable[Any]) -> torch.Tensor:
            masks = [axes.mask(Intervention(name, **{field_name: unit})) for unit in units]
            return torch.cat([mask for mask in masks if mask is not None])

        if self.at in ("channels", "heads", "tokens"):
            # parts "name:heads" are ``(N, heads, ...)``
            dim = {"channels": axes.channel_dim, "heads": 1, "tokens": axes.places[-1]}[self.at]
            return masks_of(self.at, ([unit] for unit in range(values.shape[dim]))), None
        rows, columns = axes.grid()
        if self.at == "positions":
            cells = product(range(rows), range(columns))
            return masks_of("positions", ([cell] for cell in cells)), (rows, columns)
        rows = min(REGIONS, rows)
        columns = min(REGIONS, columns)
        height = size[-2] / rows
        width = size[-1] / columns
        corners = product(range(rows), range(columns))
        boxes = (
            (column * width, row * height, (column + 1) * width, (row + 1) * height)
            for row, column in corners
        )
        return torch.cat(list(map(axes.of_region, boxes))), (rows, columns)


def _default(model: nn.Module, inputs: Inputs, at: At) -> list[str]:
    """The layers that are traced by default. For "layers", these are parts of blocks: a block's own
    output is all that later blocks see, so patching it brings back the whole score.
    """
    if at == "channels":
        return [default_layer(model, inputs)]
    if at == "heads":
        return attention_layers(model, inputs)
    names = blocks(model, inputs)
    if at != "layers":
        return names
    calls = [call for call in summary_of(model, inputs).calls if call.grid is not None]
    called_often = {call.name for call in calls if call.number}  # 0 is the first call
    layers = []
    for name in names:
        children = [call for call in calls if call.name.rpartition(".")[0] == name]
        # a block without parts that give maps is traced itself
        layers += children or [call for call in calls if call.name == name]
    return [
        name_of_call(call.name, call.number, model) if call.name in called_often else call.name
        for call in layers
    ]


def blocks(model: nn.Module, inputs: Inputs, *, include_top_level: bool = True) -> list[str]:
    """The names of a network's blocks in the order of the pass: the outermost modules in sequences
    and lists that give feature maps; ``include_top_level`` adds those around them.
    """
    called = [
        call.name for call in summary_of(model, inputs).calls if call.grid is not None and call.name
    ]
    listed = [
        name
        for name in called
        if isinstance(submodule(model, name.rpartition(".")[0]), (nn.Sequential, nn.ModuleList))
    ]

    beginnings_inside = tuple(f"{name}." for name in listed)
    outermost = {name for name in listed if not name.startswith(beginnings_inside)}
    if include_top_level:  # all modules of the network itself but those that hold the blocks
        around = {name.partition(".")[0] for name in outermost if "." in name}
        outermost |= {name for name in called if "." not in name and name not in around}
    return list(dict.fromkeys(name for name in called if name in outermost))
