"""`trace`: the effect of patching each part of a network from one photo into another, and its fast estimate."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, get_args

import torch
from torch import nn

from explain._utils.errors import HookError, LayerError, keywords
from explain._utils.nested import first_tensor, replace_first
from explain.attribution.effects import At, Effects
from explain.data.inputs import as_inputs
from explain.engine.ends import OutputReader
from explain.engine.execution import gather
from explain.engine.needs import Evidence, NeedAtLayer
from explain.engine.perturbations import Perturbation, PerturbedRows, Scores
from explain.engine.plan import Plan
from explain.engine.settings import Progress, RuntimeSettings
from explain.hooks import HookGroup, Intervention, attention_parts, capture, preserve
from explain.hooks.layer_names import Where, find_places, select_places
from explain.hooks.units import Axes
from explain.hooks.unwrap import modules_of, submodule, unwrapped
from explain.layers import default_layer
from explain.layers.frames import with_layout
from explain.layers.grids import grids_of_photo
from explain.layers.layouts import Grid, frames_in_batch
from explain.layers.summary import summary_of
from explain.targets import labels, resolve

REGIONS = 7
"""Regions are the squares of a grid of so many rows and columns."""


@dataclass(frozen=True, eq=False)
class _Patches(Perturbation):
    """The corrupted photo as often as there are patches; ``numbers`` says which patches the rows of a batch have."""

    total: int
    numbers: list[torch.Tensor] = field(default_factory=lambda: [torch.zeros(0, dtype=torch.long)])

    words = "the photo with one part patched"

    def rows(self, evidence: Evidence) -> PerturbedRows:
        x = evidence.inputs

        def make(numbers: torch.Tensor) -> torch.Tensor:
            self.numbers[0] = numbers
            return x.expand(len(numbers), *x.shape[1:]).clone()

        return PerturbedRows(torch.zeros(self.total, dtype=torch.long, device=x.device), make)


@dataclass(frozen=True, eq=False)
class _Site:
    """A place that is patched: its clean values, and the mask of each of its units, which broadcasts to them."""

    name: str
    clean: torch.Tensor
    masks: torch.Tensor
    first: int
    """The number of its first patch."""
    of_images: int
    """The dimension that images are in; in the clean values and masks it is the first."""

    def hook(self, patches: _Patches) -> Callable[[nn.Module, Any, Any], Any]:
        """A forward hook that patches the rows ``(b, ...)`` whose numbers ``(<= b,)`` are of this place."""

        def patch(module: nn.Module, args: Any, output: Any) -> Any:
            tensor = first_tensor(output)
            if tensor is None:
                return None
            values = tensor.movedim(self.of_images, 0)
            units = patches.numbers[0].cpu()[: len(values)] - self.first
            rows = ((units >= 0) & (units < len(self.masks))).nonzero()[:, 0]
            found = values.clone()
            found[rows] = torch.where(self.masks[units[rows]], self.clean, values[rows])
            return replace_first(output, found.movedim(0, self.of_images)) if len(rows) else None

        return patch


@keywords()
def trace(
    model: nn.Module, clean: Any, corrupted: Any, at: At = "layers", *, layers: Where | None = None,
    target: resolve.TargetLike = None, categories: Sequence[str] | None = None, batch_size: int | None = None,
    progress: Progress | None = None,
) -> Effects:  # fmt: skip
    """Patch each part of a network from a clean run into a corrupted one, and measure the change of the score.

    It shows which components explain the difference of the two scores. All patches run in batches. The estimate of
    attribution patching (Nanda 2023; Syed et al. 2023) takes one backward pass; `Effects.correlation` says how well it
    does.

    Args:
        model: any module.
        clean: the photo ``(1, C, H, W)`` that values are taken from.
        corrupted: the photo, of the same shape, that they are put into.
        at: "layers" patches what layers give, such as the branches of residual blocks, "channels" each channel, "heads"
            each head of attention, "tokens" each token, "positions" each place of the layers' maps, and "regions"
            squares of the photo, 7 × 7.
        layers: which layers; by default the blocks of the network, with "layers" what is inside them, with "channels"
            the last feature map, and with "heads" all attentions. ``"blocks.3.attn:q"`` is a part of an attention.
        target: the score, as for `explain.attribute`; None is the clean photo's top class.
        categories, batch_size, progress: as for `explain.attribute`.

    Raises:
        ExplainError: the photos differ in shape, or a layer has no such units.

    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))
    >>> effects = trace(model, torch.ones(1, 1, 2, 2), torch.zeros(1, 1, 2, 2), "channels", layers="0", target=1)
    >>> [(row["layer"], row["unit"]) for row in effects.rows()]
    [('0', 0), ('0', 1)]
    """
    if at not in get_args(At):
        raise HookError(f"at must be one of {', '.join(get_args(At))}, got {at!r}")
    model = unwrapped(model)
    first = with_layout(model, clean).detached()
    second = replace(as_inputs(corrupted).detached(), layout=first.layout)
    if len(first) != 1 or first.x.shape != second.x.shape:
        shapes = f"{tuple(first.x.shape)} and {tuple(second.x.shape)}"
        raise HookError(f"clean and corrupted must be one photo each, of the same shape, got {shapes}")
    names = select_places(model, layers) if layers is not None else _default(model, first, at)
    missing = LayerError(f"model must have {at} to be traced, got none; name the layers")
    if not names:
        raise missing
    if at == "heads":
        names = [name if find_places(model, name)[name].part else f"{name}:heads" for name in names]
    reader = OutputReader(model, first, None, None if categories is None else len(categories))
    with preserve.untouched(model), reader.in_use():
        with torch.no_grad(), capture(model, names, gradients=False) as of_clean:
            output = first.call(model)
        chosen = resolve.as_target(target, categories).sized(tuple(first.x.shape[2:])).settled(output, 1)
        score, classes = chosen.pick(output, 1)[:2]
        x = second.x.clone().requires_grad_()
        with torch.enable_grad(), capture(model, names) as of_corrupted:
            before = chosen.pick(second.replaced(x).call(model), 1)[0][0]
        of_corrupted.backward(before, (x,), roughly=True)
    sites, total, find_grid = list[_Site](), 0, grids_of_photo(model, first)
    estimates, grids = dict[str, torch.Tensor](), dict[str, tuple[int, int]]()
    for name in names:
        record, other = of_clean.of(name), of_corrupted.of(name)
        if record is None or other is None:
            continue  # an attention that this network does not compute
        shape = tuple(record.activation.shape)
        if (frames := frames_in_batch(shape, tuple(first.x.shape[2:]))) and frames > 1:
            if layers is not None:
                raise LayerError(
                    f"layer {name!r} must give one row for a photo, got {frames}, its frames; name another"
                )
            continue
        of_tokens = find_grid(name, shape[-2]) if len(shape) == 3 else None
        of_images = 0 if of_tokens is None else of_tokens.of_images
        clean_values = record.activation.movedim(of_images, 0)
        try:
            masks, grid = _masks(at, name, clean_values, model, tuple(first.x.shape[2:]), find_grid)
        except HookError:
            if layers is not None:
                raise
            continue  # a layer without such units
        calls = len([each for each in of_clean.records if each.layer == record.layer])
        where = name if calls == 1 or "@" in name else f"{name}@{calls - 1}"  # the last of several
        sites.append(_Site(where, clean_values, masks, total, of_images))
        total += len(masks)
        gradient = torch.zeros_like(other.activation) if other.gradient is None else other.gradient
        change = ((record.activation - other.activation) * gradient).movedim(of_images, 0)[0]
        estimates[where] = torch.stack([(change * mask).sum() for mask in masks]).cpu()
        if grid is not None:
            grids[where] = grid
    if not sites:
        raise missing
    patches = _Patches(total)
    with HookGroup(model) as group, reader.in_use():
        for site in sites:
            group.forward(site.name, site.hook(patches))
        plan = Plan({"trace": frozenset({NeedAtLayer(Scores(patches), None)})})
        (evidence_of,) = gather(model, second, plan, [chosen], RuntimeSettings(batch_size, progress=progress))
    scores = evidence_of(None)[Scores(patches)].cpu()
    effects = {site.name: scores[site.first : site.first + len(site.masks)] - before.detach().cpu() for site in sites}
    label = chosen.name if classes is None else labels.class_label(categories, int(classes[0]))
    photo = None
    if first.x.ndim == 4:
        grey = first.x[0].detach().float().mean(0).cpu()
        photo = (grey - grey.amin()) / (grey.amax() - grey.amin()).clamp(min=1e-12)
    return Effects(at, effects, estimates, float(score), float(before.detach()), label, grids, photo)


def _default(model: nn.Module, inputs: Any, at: At) -> list[str]:
    """The layers that are traced by default."""
    if at == "channels":
        return [default_layer(model, inputs)]
    if at == "heads":
        with_heads = {m: [each for each in m.modules() if attention_parts.head_count(each)] for m in modules_of(model)}
        return [name for module, name in modules_of(model).items() if with_heads[module][-1:] == [module]]
    found = blocks(model, inputs)
    if at != "layers":
        return found
    # the output of a block is all that later ones see, unlike that of a branch inside it
    calls = [call for call in summary_of(model, inputs).calls if call.grid is not None]
    inside = {name: [call for call in calls if call.name.rpartition(".")[0] == name] for name in found}
    several = {call.name for call in calls if call.number}
    chosen = [call for name in found for call in inside[name] or [call for call in calls if call.name == name]]
    return [f"{call.name}@{call.number}" if call.name in several else call.name for call in chosen]


def blocks(model: nn.Module, inputs: Any, *, include_top_level: bool = True) -> list[str]:
    """The blocks of a network: the outermost modules in sequences and lists, and the top-level modules around them."""
    summary, modules = summary_of(model, inputs), dict(model.named_modules())
    called = [call.name for call in summary.calls if call.grid is not None and call.name]
    lists = (nn.Sequential, nn.ModuleList)
    parents = {name: modules[name.rpartition(".")[0]] for name in called}
    inside = [name for name in called if isinstance(parents[name], lists)]
    inside = [name for name in inside if not any(name.startswith(f"{other}.") for other in inside if other != name)]
    top = [name for name in called if "." not in name and not any(each.startswith(f"{name}.") for each in inside)]
    return list(dict.fromkeys(name for name in called if name in {*inside, *(top if include_top_level else ())}))


def _masks(
    at: At, name: str, values: torch.Tensor, model: nn.Module, size: tuple[int, ...],
    grid_of: Callable[[str, int], Grid | None],
) -> tuple[torch.Tensor, tuple[int, int] | None]:  # fmt: skip
    """The masks ``(units, ...)`` of all units of a place, and the rows and columns that they are laid out in."""
    place = find_places(model, name)[name]

    def find_grid() -> Grid | None:
        grid = grid_of(name, values.shape[-2])
        return None if grid is None else replace(grid, layout="tokens")  # the images are in the first dimension here

    axes = Axes(values, place, submodule(model, place.module), model, size, name, find_grid=find_grid)
    if at == "layers":
        return torch.ones([1] * values.ndim, dtype=torch.bool, device=values.device), None

    def mask(**chosen: Any) -> torch.Tensor:
        found = axes.mask(Intervention(name, **chosen))
        assert found is not None
        return found

    if at in ("channels", "heads", "tokens"):
        dim = {"channels": axes.channel_dim, "heads": 1}.get(at, values.ndim - 2)
        return torch.cat([mask(**{at: [unit]}) for unit in range(values.shape[dim])]), None
    rows, columns = axes.grid()
    if at == "positions":
        return torch.cat([mask(positions=[each]) for each in product(range(rows), range(columns))]), (rows, columns)
    rows, columns = min(REGIONS, rows), min(REGIONS, columns)
    high, wide = size[-2] / rows, size[-1] / columns
    boxes = [(j * wide, i * high, (j + 1) * wide, (i + 1) * high) for i in range(rows) for j in range(columns)]
    return torch.cat([mask(region=box) for box in boxes]), (rows, columns)
