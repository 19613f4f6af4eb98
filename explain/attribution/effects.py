"""`trace`: the effect of patching each part of a network from one photo into another, and its fast estimate; `lens`:
the scores that each block would give, if it were the last."""

import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from PIL import Image
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from explain._utils.errors import HookError, LayerError, keywords
from explain._utils.html import picture_html
from explain._utils.nested import first_tensor, replace_first
from explain.data.inputs import InputsLike, as_inputs
from explain.engine.ends import OutputReader, reading
from explain.engine.execution import gather
from explain.engine.needs import Evidence, NeedAtLayer
from explain.engine.perturbations import Perturbation, PerturbedRows, Scores
from explain.engine.plan import Plan
from explain.engine.settings import Progress, RuntimeSettings
from explain.hooks import HookGroup, Intervention, attention_parts, capture, preserve
from explain.hooks.layer_names import Layout, Where, find_places, select_places
from explain.hooks.unwrap import modules_of, submodule, unwrapped
from explain.layers import default_layer
from explain.layers.frames import with_layout
from explain.layers.grids import grids_of_photo
from explain.layers.layouts import Grid, frames_in_batch
from explain.layers.summary import summary_of
from explain.targets import labels, resolve
from explain.targets.base import find_logits

if TYPE_CHECKING:
    from matplotlib.figure import Figure

At = Literal["layers", "channels", "heads", "tokens", "positions", "regions"]
REGIONS = 7
"""Regions are the squares of a grid of so many rows and columns."""


@dataclass(frozen=True, eq=False)
class Effects:
    """What patching from a clean photo into a corrupted one does to a score; it prints itself as a table.

    ``by_layer`` has for each layer how much the score rises with each patch ``(units,)``, and ``estimates`` what
    attribution patching says of it: the gradient of the corrupted photo's score, times the difference of the values.
    ``clean`` and ``corrupted`` are the scores of both photos. ``grid`` has the rows and columns of a layer's units,
    where they are places of the ``photo``, the clean one in grey ``(H, W)`` from 0 to 1.
    """

    at: At
    by_layer: Mapping[str, torch.Tensor] = field(repr=False)
    estimates: Mapping[str, torch.Tensor] = field(repr=False)
    clean: float
    corrupted: float
    target: str
    grid: Mapping[str, tuple[int, int]] = field(default_factory=dict, repr=False)
    photo: torch.Tensor | None = field(default=None, repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each patch: layer, unit, effect, estimate, and the share of the difference of the scores."""
        whole = self.clean - self.corrupted
        found = []
        for layer, effects in self.by_layer.items():
            pairs = zip(effects.tolist(), self.estimates[layer].tolist(), strict=True)
            for unit, (effect, estimate) in enumerate(pairs):
                row = {"layer": layer, "unit": None if self.at == "layers" else unit, "effect": effect}
                found.append({**row, "estimate": estimate, "share": effect / whole if whole else None})
        return found

    @cached_property
    def correlation(self) -> float:
        """The correlation of the effects with their estimates; NaN where one of them is the same everywhere."""
        both = torch.stack([torch.cat([*each.values()]).double() for each in (self.by_layer, self.estimates)])
        return float(torch.corrcoef(both)[0, 1]) if both.shape[1] > 1 else float("nan")

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain values."""
        about = {"at": self.at, "target": self.target, "clean": self.clean, "corrupted": self.corrupted}
        correlation = None if math.isnan(self.correlation) else self.correlation
        return {**about, "correlation": correlation, "effects": self.rows()}

    def __str__(self) -> str:
        rows = self.rows() if self.at == "layers" else sorted(self.rows(), key=lambda row: -abs(row["effect"]))[:15]
        width = max(len(row["layer"]) for row in rows)
        lines = [f"score of {self.target}: clean {self.clean:.4g}, corrupted {self.corrupted:.4g}"]
        unit = self.at.removesuffix("s")
        lines.append(f"{'layer':<{width}}  {unit:>8}  {'effect':>8}  {'share':>6}  {'estimate':>8}")
        for row in rows:
            share = "" if row["share"] is None else f"{row['share']:.0%}"
            unit = "all" if row["unit"] is None else row["unit"]
            effects = f"{row['effect']:>8.3g}  {share:>6}  {row['estimate']:>8.3g}"
            lines.append(f"{row['layer']:<{width}}  {unit:>8}  {effects}")
        return "\n".join([*lines, f"correlation of effects and estimates: {self.correlation:.2f}"])

    def figure(self) -> "Figure":
        """Return a matplotlib figure: bars for layers, a grid of layers by units, or maps on the photo."""
        from matplotlib.cm import ScalarMappable
        from matplotlib.colors import Normalize
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator

        largest = max(float(each.abs().max()) for each in self.by_layer.values()) or 1.0
        scale: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -largest, "vmax": largest}
        unit = "effect on the score"
        if self.at == "layers":
            figure = Figure(figsize=(6.4, 0.8 + 0.28 * len(self.by_layer)), layout="constrained")
            axes = figure.subplots()
            axes.barh([*self.by_layer], [float(each[0]) for each in self.by_layer.values()], color="#4477aa")
            axes.margins(y=0.01)
            axes.invert_yaxis()
            axes.axvline(0, color="#444444", linewidth=0.8)
            axes.set_xlabel(f"{unit} of {self.target}")
            return figure
        if self.grid:
            columns = min(4, len(self.by_layer))
            count = -(-len(self.by_layer) // columns)
            figure = Figure(figsize=(2.4 * columns + 0.8, 2.5 * count), layout="constrained")
            figure.subplots(count, columns, squeeze=False, subplot_kw={"frame_on": False, "xticks": [], "yticks": []})
            for axes, (layer, effects) in zip(figure.axes, self.by_layer.items(), strict=False):
                found = effects.reshape(self.grid[layer]).numpy()
                height, width = found.shape if self.photo is None else self.photo.shape
                place: dict[str, Any] = {"extent": (0, width, height, 0)}
                if self.photo is not None:  # it shows through where a patch does little
                    axes.imshow(self.photo.numpy(), cmap="gray", vmin=-0.3, vmax=1.3, **place)
                    place["alpha"] = (0.15 + abs(found) / largest).clip(max=0.85)
                axes.imshow(found, **scale, **place)
                axes.set_title(layer, fontsize=9)
            colors = ScalarMappable(Normalize(-largest, largest), scale["cmap"])  # without the maps' transparency
            figure.colorbar(colors, ax=figure.axes, label=unit, shrink=0.7)
            return figure
        table = pad_sequence([*self.by_layer.values()], batch_first=True, padding_value=math.nan)
        size = (min(12.0, 2.4 + 0.3 * table.shape[1]), 1.2 + 0.32 * len(table))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        picture = axes.imshow(table.numpy(), aspect="auto", **scale)
        axes.set_yticks(range(len(self.by_layer)), [*self.by_layer])
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(self.at.removesuffix("s"))
        figure.colorbar(picture, ax=axes, label=unit)
        return figure

    def picture(self) -> Image.Image:
        """The figure as a picture."""
        buffer = io.BytesIO()
        self.figure().savefig(buffer, format="png", dpi=110)
        return Image.open(buffer)

    def _repr_html_(self) -> str:
        return picture_html(self.picture(), f"effects of patches by {self.at} on {self.target}")


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

    layout = Layout(values, place, submodule(model, place.module), model, size, name, find_grid=find_grid)
    if at == "layers":
        return torch.ones([1] * values.ndim, dtype=torch.bool, device=values.device), None

    def mask(**chosen: Any) -> torch.Tensor:
        found = layout.mask(Intervention(name, **chosen))
        assert found is not None
        return found

    if at in ("channels", "heads", "tokens"):
        dim = {"channels": layout.channel_dim, "heads": 1}.get(at, values.ndim - 2)
        return torch.cat([mask(**{at: [unit]}) for unit in range(values.shape[dim])]), None
    rows, columns = layout.grid()
    if at == "positions":
        return torch.cat([mask(positions=[each]) for each in product(range(rows), range(columns))]), (rows, columns)
    rows, columns = min(REGIONS, rows), min(REGIONS, columns)
    high, wide = size[-2] / rows, size[-1] / columns
    boxes = [(j * wide, i * high, (j + 1) * wide, (i + 1) * high) for i in range(rows) for j in range(columns)]
    return torch.cat([mask(region=box) for box in boxes]), (rows, columns)


@dataclass(frozen=True, eq=False)
class Lens:
    """What the last layers of a network make of each block's output; it prints itself as a table.

    ``scores`` ``(blocks, N, K)`` are the class scores that follow each of ``layers``; those of the last are the model's
    own. ``tokens`` ``(blocks, N, T, K)`` are those of each token alone: all tokens have its values. They are None where
    blocks give maps, or ``tokens`` is false.
    """

    layers: tuple[str, ...]
    scores: torch.Tensor = field(repr=False)
    tokens: torch.Tensor | None = field(default=None, repr=False)
    categories: Sequence[str] | None = field(default=None, repr=False)

    def rows(self) -> list[dict[str, Any]]:
        """A dictionary for each block and image: layer, image, the top class and its score."""
        best = self.scores.max(-1)
        return [
            {"layer": layer, "image": image, "target": labels.class_label(self.categories, index), "score": score}
            for layer, indices, values in zip(self.layers, best.indices.tolist(), best.values.tolist(), strict=True)
            for image, (index, score) in enumerate(zip(indices, values, strict=True))
        ]

    def __str__(self) -> str:
        width = max(map(len, self.layers))
        return "\n".join(f"{row['layer']:<{width}}  {row['score']:>8.3g}  {row['target']}" for row in self.rows())


@keywords()
def lens(
    model: nn.Module, x: InputsLike, *, layers: Where | None = None, tokens: bool = False,
    categories: Sequence[str] | None = None,
) -> Lens:  # fmt: skip
    """Let the last layers of a network read what each of its blocks gives (nostalgebraist 2020).

    The output of each block takes the place of the last block's, so that the network's own pooling, normalisation and
    head read it, whatever they are.

    Args:
        model: a network whose blocks give tensors of one shape, such as a transformer.
        x: photos ``(N, C, H, W)``.
        layers: the blocks; by default those that give tensors of the last one's shape.
        tokens: also read each token alone.
        categories: the labels of the classes.

    Raises:
        ExplainError: the blocks differ in shape, or the model gives no class scores.

    >>> block = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2), block, block[0], nn.Linear(2, 3))
    >>> x = torch.ones(1, 1, 2, 2)
    >>> found = lens(model, x, layers=["1", "2", "3"])
    >>> found.scores.shape, torch.allclose(found.scores[-1], model(x))
    (torch.Size([3, 1, 3]), True)
    """
    model = unwrapped(model)
    inputs = with_layout(model, x).detached()
    own = blocks(model, inputs, include_top_level=False)
    names = own if layers is None else select_places(model, layers)
    with preserve.untouched(model), torch.no_grad(), reading(model, inputs, None, categories):
        with capture(model, list(dict.fromkeys([*names, *own])), gradients=False) as seen:
            output = inputs.call(model)
        ran = list(dict.fromkeys(record.layer for record in seen.records))  # in the order of the pass
        given = {name: record.activation for name in ran if (record := seen.of(name)) is not None}
        if not given.keys() & set(names):
            raise LayerError("model must have blocks to be read by its last layers, got none; name the layers")
        shape = given[[name for name in ran if name in names][-1]].shape
        last = [name for name in ran if given[name].shape == shape][-1]  # what follows it reads all of them
        wrong = next((name for name in names if name in given and given[name].shape != shape), None)
        if wrong is not None and layers is not None:
            raise LayerError(f"layers must give tensors of one shape, got {(*given[wrong].shape,)} and {(*shape,)}")
        found = {name: given[name] for name in ran if name in names and given[name].shape == shape}
        find_logits(output, len(inputs))  # refuses a model without class scores
        scores = torch.stack([_read(model, inputs, last, values) for values in found.values()])
        of_tokens = None
        if tokens and given[last].ndim == 3:
            images = [inputs.rows(torch.tensor([i])) for i in range(len(inputs))]

            def read(values: torch.Tensor) -> torch.Tensor:  # only what follows the last block runs for each token
                rows = [row[:, None].expand(-1, len(row), -1) for row in values]  # each token in all places
                return torch.stack([_read(model, one, last, row) for one, row in zip(images, rows, strict=True)])

            of_tokens = torch.stack([read(values) for values in found.values()])
    return Lens(tuple(found), scores, of_tokens, categories)


def _read(model: nn.Module, inputs: Any, last: str, values: torch.Tensor) -> torch.Tensor:
    """The class scores where the last block gives these values ``(b, ...)``, of as many images or of more."""

    with HookGroup(model) as group:
        group.forward(last, lambda module, args, output: replace_first(output, values.clone()))
        return find_logits(inputs.call(model), len(values)).cpu()
