"""`ReattributionMetric`: metrics that run the method again, on each distinct variant once; copies
of a model with reinitialised layers."""

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property
from itertools import groupby, islice, pairwise, product
from typing import Any, ClassVar, Protocol

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import TorchDispatchMode

from explain._utils import nested
from explain._utils.errors import MetricError, muted, raised
from explain.attribution.api import attribute
from explain.attribution.options import Options
from explain.attribution.result import Attribution
from explain.data.inputs import Inputs
from explain.engine import Evidence
from explain.engine.ends import outputs_of
from explain.engine.perturbations import OneForEach
from explain.engine.settings import report_progress
from explain.hooks import copied
from explain.hooks.intervening import active_interventions, intervene
from explain.hooks.preserve import calculating, untouched
from explain.hooks.tracer import running_modules
from explain.hooks.unwrap import modules_of, sharded
from explain.layers.layouts import Grids
from explain.layers.summary import summary_of
from explain.methods import Method, Smooth
from explain.metrics.base import Metric, MetricInput, MetricResult
from explain.metrics.maps import Maps, MapsLike, Sign, Similarity, similarity
from explain.targets import ClassTarget, Target
from explain.targets.outputs import Activation, Outputs

POWER_ITERATIONS = 15
"""Of spectral normalisation after new weights: as many as torch makes when it is registered."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A module that is initialised as one, with its own parameters in the order of their first use.

    The parametrizations of a module belong to it. A parameter in no module makes a layer of its
    own.
    """

    name: str
    module: nn.Module
    parameters: tuple[torch.Tensor, ...]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The layer's own parameters and buffers."""
        parts = _own_parts(self.module)
        return [
            each
            for part in parts
            for each in (*part.parameters(recurse=False), *part.buffers(recurse=False))
        ]

    def write(self, values: Sequence[torch.Tensor]) -> None:
        for own, value in zip(self.tensors, values, strict=True):
            own.copy_(value)


def layers_with_weights(model: nn.Module, inputs: Inputs) -> list[Layer]:
    """The layers with trained values that a forward pass uses, in the order in which it first uses
    these.

    It is independent of the order in which modules were registered. Modules in plain lists, which
    are not registered at all, are found when they run. Of shared parameters, the module that comes
    first counts.

    >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))
    >>> [layer.name for layer in layers_with_weights(model, Inputs((torch.ones(1, 3, 4, 4),)))]
    ['0', '3']
    """
    uses = _Uses()
    with untouched(model), uses:
        inputs.detached().call(model)
    names = modules_of(model)
    parts = dict.fromkeys(
        part for module in uses.modules for part in module.modules() if part not in names
    )
    names |= {
        part: f"unregistered {type(part).__name__} {number}" for number, part in enumerate(parts)
    }
    parametrizing = {part for module in names for part in _own_parts(module)[1:]}
    layers: dict[tuple[int, ...], Layer] = {}  # by the numbers of the tensors that they use
    for module, name in names.items():
        tensors = uses.in_order(_trained(module))
        if tensors and module not in parametrizing:
            layers.setdefault(tuple(tensors), Layer(name, module, tuple(tensors.values())))
    known = {number for numbers in layers for number in numbers}
    loose = [each for each in uses.parameters.values() if known.isdisjoint(uses.in_order([each]))]
    for number, parameter in enumerate(loose):
        numbers = tuple(uses.in_order([parameter]))
        layers[numbers] = Layer(
            f"parameter {number} of no module", nn.ParameterList([parameter]), (parameter,)
        )
    return [layers[numbers] for numbers in sorted(layers)]


def _trained(module: nn.Module) -> list[torch.Tensor]:
    """Parameters, and the statistics of normalisations, that a module holds itself."""
    parameters = [each for part in _own_parts(module) for each in part.parameters(recurse=False)]
    return [
        *parameters,
        *(module.buffers(recurse=False) if hasattr(module, "reset_running_stats") else ()),
    ]


def _own_parts(module: nn.Module) -> list[nn.Module]:
    """The module, and all that parametrizes its tensors."""
    return (
        [module, *_parametrizations(module).modules()]
        if parametrize.is_parametrized(module)
        else [module]
    )


def _parametrizations(module: nn.Module) -> nn.ModuleDict:
    return module.parametrizations if parametrize.is_parametrized(module) else nn.ModuleDict()  # type: ignore[return-value]


def _memory(tensor: torch.Tensor) -> int:
    """The address of a tensor, which its views from the first value on share (``.data``,
    ``.T``)."""
    return (tensor.data_ptr() if tensor.layout == torch.strided else 0) or id(tensor)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the order in which this thread's operations first use tensors, and which of these are
    parameters.

    The modules that run them are read from Python's stack, where those in plain lists are too.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.order: dict[int, int] = {}
        self.parameters: dict[int, nn.Parameter] = {}
        self.modules: dict[nn.Module, None] = {}

    def in_order(self, tensors: Iterable[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Those that are used, by their numbers in the order of first use."""
        used = {self.order[_memory(each)]: each for each in tensors if _memory(each) in self.order}
        return dict(sorted(used.items()))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outermost_first = reversed(list(running_modules(sys._getframe(1))))
        self.modules |= dict.fromkeys(outermost_first)
        for _, tensor in nested.paths((args, kwargs or {})):
            self.order.setdefault(_memory(tensor), len(self.order))
            if isinstance(tensor, nn.Parameter):
                self.parameters[id(tensor)] = tensor
        return func(*args, **(kwargs or {}))


def grouped(layers: Sequence[str], steps: int | None) -> list[list[str]]:
    """Cut layers into so many groups of neighbours, of one size but for rounding; None makes each
    one of its own.

    >>> grouped(["a", "b", "c"], 2)
    [['a', 'b'], ['c']]
    """
    count = len(layers) if steps is None else min(steps, len(layers))
    ends = [-(-len(layers) * k // count) for k in range(count + 1)]
    return [list(layers[start:end]) for start, end in pairwise(ends)]


class Randomised:
    """One copy of a model, some layers of which are initialised once more: `of` says which.

    A layer is initialised as its class does it (``reset_parameters``), normalisations with their
    statistics. Under weight or spectral normalisation, a parametrization or pruning, the plain
    weight is initialised, and what it is computed from follows. Parameters that this leaves
    unchanged, such as class tokens, are shuffled. The values of a layer depend on the seed and its
    position in the forward pass only, whichever other layers are initialised.

    Each layer is initialised once for a seed, and its values are stored for the next states. The
    copy is the same object all the time, so a state ends when `of` is called again.

    Raises:
        MetricError: the model cannot be copied, or the copy uses weights of the model itself.

    >>> model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    >>> other = Randomised(model, Inputs((torch.ones(1, 3),))).of(["1"])
    >>> torch.equal(other[0].weight, model[0].weight), torch.equal(other[1].weight, model[1].weight)
    (True, False)
    """

    def __init__(self, model: nn.Module, inputs: Inputs) -> None:
        freed = sharded(model)
        if freed:
            but = (
                f"FSDP shards layer {next(iter(freed))!r}; evaluate a plain model with its full "
                "state dict"
            )
            raise MetricError(f"model must hold whole weights for random ones, but {but}")
        here = {
            _memory(each)
            for layer in layers_with_weights(model, inputs)
            for each in layer.parameters
        }
        try:
            self._copy = copied(model)
        except Exception as error:
            raise MetricError(
                f"model must be one that copy.deepcopy can copy, but {raised(error)}"
            ) from error
        self._layers = {layer.name: layer for layer in layers_with_weights(self._copy, inputs)}
        self._seed: int | None = None
        self._trained: dict[str, list[torch.Tensor]] = {}
        self._initial: dict[str, list[torch.Tensor]] = {}
        for layer in self._layers.values():
            if any(_memory(each) in here for each in layer.parameters):
                raise MetricError(
                    f"model must hold its weights in attributes, but {layer.name!r} is a global "
                    "variable"
                )
        # their names, in the order in which a forward pass uses them
        self.layers = list(self._layers)

    def of(self, layers: Collection[str], seed: int = 0) -> nn.Module:
        """Return the copy with these layers initialised, and all others as they were.

        Raises:
            MetricError: a layer cannot be initialised.
        """
        if seed != self._seed:
            self._seed = seed
            self._initial = {}
        with torch.inference_mode(False), torch.no_grad():
            for name, values in self._trained.items():
                self._layers[name].write(values)
            chosen = [layer for layer in self._layers.values() if layer.name in layers]
            for layer in chosen:  # before any is initialised, since layers may share their weights
                self._trained.setdefault(layer.name, _values(layer.tensors))
            for layer in chosen:
                if layer.name not in self._initial:
                    number = self.layers.index(layer.name)
                    self._initial[layer.name] = self._initialised(
                        layer, (seed * 1_000_003 + number) % 2**63
                    )
            for layer in chosen:
                layer.write(self._initial[layer.name])
        return self._copy

    def _initialised(self, layer: Layer, seed: int) -> list[torch.Tensor]:
        """Initialise a layer, return its new values, and restore all that this changed."""
        changed = [*layer.module.parameters(), *layer.module.buffers()]
        before = _values(changed)
        own = _values(layer.parameters)
        devices = sorted(
            {each.device.index or 0 for each in layer.tensors if each.device.type == "cuda"}
        )
        try:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(seed)
                _reset(layer)
                for parameter, value in zip(layer.parameters, own, strict=True):
                    if isinstance(parameter, nn.Parameter) and torch.equal(parameter, value):
                        order = torch.randperm(parameter.numel(), device="cpu").to(parameter.device)
                        parameter.copy_(value.flatten()[order].reshape(parameter.shape))
                _iterate(layer.module)
            return _values(layer.tensors)
        finally:
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
            layer.write(self._trained[layer.name])


def _values(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.detach().clone() for each in tensors]


def _reset(layer: Layer) -> None:
    """Let a module initialise its weights where they are plain ones, and bring them back to what
    they come from.

    Raises:
        MetricError: the module's own function fails.
    """
    module = layer.module
    reset = "reset_parameters" if hasattr(module, "reset_parameters") else "_reset_parameters"
    if not callable(getattr(module, reset, None)):
        return
    weights = {
        name: nn.Parameter(getattr(module, name).detach().clone())
        for name in _parametrizations(module)
    }
    plain: Any = module
    if weights:
        plain = object.__new__(parametrize.type_before_parametrizations(module))
        plain.__dict__ |= {**vars(module), "_parameters": {**module._parameters, **weights}}
    try:
        getattr(plain, reset)()
    except Exception as error:
        raise MetricError(
            f"layer {layer.name!r} must have a working {reset}, but it {raised(error)}"
        ) from error
    for name, weight in weights.items():
        # a parametrization without an inverse: what it comes from is shuffled
        with suppress(RuntimeError):
            setattr(module, name, weight.detach())
    # those of torch.nn.utils before parametrizations
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            weight = getattr(module, hook.name).detach()
            getattr(module, f"{hook.name}_v").copy_(weight)
            getattr(module, f"{hook.name}_g").copy_(torch.norm_except_dim(weight, 2, hook.dim))
        elif isinstance(hook, (SpectralNorm, BasePruningMethod)):
            name = hook.name if isinstance(hook, SpectralNorm) else hook._tensor_name
            getattr(module, f"{name}_orig").copy_(getattr(module, name).detach())


def _iterate(module: nn.Module) -> None:
    """Let spectral normalisation, which goes on with every step of training, find the norm of new
    weights."""
    parts = {part: part.training for part in _own_parts(module)[1:]}
    for part in parts:
        part.training = True
    for _ in range(POWER_ITERATIONS):
        for name in _parametrizations(module):
            getattr(module, name)
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                hook.compute_weight(module, do_power_iteration=True)
    for part, training in parts.items():
        part.training = training


AT_ONCE = 16
"""How many perturbed photos are explained in one batch."""


def photos_of(inputs: Inputs) -> torch.Tensor:
    """The photos ``(N, C, H, W)`` among a model's inputs, in at least single precision."""
    x = inputs.x
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


@dataclass(eq=False)
class ModelContext:
    """What a metric may change: the ``model``, N ``images``, and the ``classes`` ``(N,)`` and their
    number ``K``.

    ``logits`` ``(N, K)`` are the scores of all classes, ``outputs`` says how they become
    probabilities, and ``inputs`` are the model's arguments, which contain the photos. ``ranking``
    has the scores of all classes, and the classes that are explained, also where these belong to a
    region or a box.
    """

    model: nn.Module
    inputs: Inputs
    classes: torch.Tensor | None
    logits: torch.Tensor | None
    activation: InitVar[Activation | None]
    images: torch.Tensor = field(init=False)
    outputs: Outputs = field(init=False)
    ranking: tuple[torch.Tensor, torch.Tensor] | None = None

    def __post_init__(self, activation: Activation | None) -> None:
        self.images = photos_of(self.inputs)
        self.classes = None if self.classes is None else self.classes.to(self.images.device)
        self.outputs = Outputs()
        if self.logits is not None:
            self.logits = self.logits.to(self.images.device)
            self.outputs = outputs_of(self.model, self.inputs, self.logits, activation)
            if self.ranking is None and self.classes is not None:
                self.ranking = self.logits, self.classes

    def data(self, name: str, given: MapsLike, score: torch.Tensor, **truth: Any) -> MetricInput:
        """What metrics see of some maps, with the ``boxes`` and ``regions`` of the object where
        these are known.

        There is no probability of a class that is the only one.
        """
        probability = None
        logits = self.logits
        if self.classes is not None and logits is not None and logits.shape[1] > 1:
            known = self.outputs.probabilities(logits) is not None
            probability = self.outputs.of_classes(logits, self.classes) if known else None
        maps = Maps.of(name, given, self.images)
        score = score.to(self.images.device)
        return MetricInput(
            maps, self.images, score, probability, self.classes, outputs=self.outputs, **truth
        )

    def changed(self, change: OneForEach | None) -> torch.Tensor:
        """The photos after a change."""
        if change is None:
            return self.images
        size = tuple(self.images.shape[2:])
        rows = change.rows(
            Evidence(self.images, self.images.new_zeros(len(self.images)), None, "", Grids(size))
        )
        return rows.make(torch.arange(len(self.images), device=self.images.device))

    @property
    def count(self) -> int | None:
        return None if self.logits is None else int(self.logits.shape[1])

    @cached_property
    def randomised(self) -> Randomised:
        """A copy of the model, the same one for all metrics, whose layers are reinitialised."""
        alone = summary_of(self.model, self.inputs).alone
        return Randomised(self.model, self.inputs.first() if alone else self.inputs)


class OtherModel(Protocol):
    """A frozen value that makes another model, whose layers' names begin with ``prefix``."""

    prefix: ClassVar[str]

    def __call__(self, context: ModelContext) -> nn.Module: ...


@dataclass(frozen=True)
class RandomWeights:
    """The model with some layers initialised once more."""

    layers: frozenset[str]
    seed: int

    prefix: ClassVar[str] = ""

    def __call__(self, context: ModelContext) -> nn.Module:
        return context.randomised.of(self.layers, self.seed)


@dataclass(frozen=True)
class Variant:
    """A variant in which the method runs again; what is None is not changed. Equal variants are run
    once.

    ``images`` makes another photo of each, ``model`` another model; ``classes`` are another one of
    each image, and ``wrap`` is put around the method.
    """

    images: OneForEach | None = None
    model: OtherModel | None = None
    classes: tuple[int, ...] | None = None
    wrap: Smooth | None = None


@dataclass(frozen=True, eq=False)
class VariantResult:
    """The maps and scores of a method in a variant."""

    maps: Maps
    images: torch.Tensor
    score: torch.Tensor
    logits: torch.Tensor | None


def norm(values: torch.Tensor) -> torch.Tensor:
    """The Euclidean norm of each image's values ``(N,)``."""
    return values.flatten(1).norm(dim=1)  # type: ignore[no-any-return]


class ReattributionMetric(Metric):
    """A metric that runs the method again: it needs a method, and not only its map."""

    similarity: Similarity
    sign: Sign

    def variants(self, context: ModelContext, data: MetricInput) -> Iterator[Variant]:
        """The variants that the method is run in."""
        raise NotImplementedError

    def compare(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        """One number for each image ``(N,)``, or several ``(N, k)``, from the maps of a variant.

        It is the length of the map's change relative to the map's own length, unless a metric says
        otherwise.
        """
        length = norm(data.maps.values)
        return norm(found.maps.values - data.maps.values) / torch.where(length > 0, length, 1)

    def similarity_to(self, data: MetricInput, found: VariantResult) -> torch.Tensor:
        """How similar the map is to that of a variant ``(N,)``, by the metric's options."""
        return similarity(
            self.similarity, data.maps.per_pixel(self.sign), found.maps.per_pixel(self.sign)
        )

    def __call__(self, data: MetricInput, numbers: torch.Tensor) -> MetricResult:
        """Return a figure for each image, from the numbers ``(N, V)`` or ``(N, V, k)`` of V
        variants."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class EvaluatedMethod:
    """A method of an evaluation, its attribution, and the input of metrics."""

    method: Method
    attribution: Attribution
    data: MetricInput


Results = dict[tuple[str, str], MetricResult]
"""By method and metric."""


@dataclass(eq=False)
class _Use:
    """A variant, and the metrics that compare its maps, by method."""

    variant: Variant
    metrics: dict[str, list[ReattributionMetric]] = field(default_factory=dict)


def reattribute(
    metrics: Sequence[ReattributionMetric],
    methods: Mapping[str, EvaluatedMethod],
    context: ModelContext,
    target: Target,
    options: Options,
) -> Results:
    """Run methods again in all variants that metrics need, each distinct variant once for all of
    them.

    What the target reads from the output, such as a region, is settled on the unperturbed photos,
    for all variants.
    """
    if type(target).settled is not Target.settled:
        with untouched(context.model):
            target = target.settled(
                context.inputs.detached().call(context.model), len(context.inputs)
            )
    uses: dict[Variant, _Use] = {}
    variants: dict[tuple[str, str], list[Variant]] = {}
    for metric, (name, method) in product(metrics, methods.items()):
        for variant in metric.variants(context, method.data):
            variants.setdefault((name, metric.name), []).append(variant)
            use = uses.setdefault(variant, _Use(variant))
            use.metrics.setdefault(name, []).append(metric)
    numbers: dict[tuple[str, str, Variant], torch.Tensor] = {}
    done = 0
    for batch in _batches(list(uses.values()), len(context.images)):
        used = {name: methods[name] for use in batch for name in use.metrics}
        results = _run([use.variant for use in batch], used, context, target, options)
        with calculating(context.images.device.type):
            for use, maps in zip(batch, results, strict=True):
                for name, metric in (
                    (name, metric)
                    for name, comparing in use.metrics.items()
                    for metric in comparing
                ):
                    compared = metric.compare(methods[name].data, maps[name])
                    numbers[name, metric.name, use.variant] = compared
        done += len(batch)
        report_progress(options.get("progress"), done, len(uses))
    figures: Results = {}
    for metric, (name, method) in product(metrics, methods.items()):
        of_variants = [
            numbers[name, metric.name, variant] for variant in variants[name, metric.name]
        ]
        figures[name, metric.name] = metric(method.data, torch.stack(of_variants, 1))
    return figures


def _batches(uses: Sequence[_Use], images: int) -> Iterator[list[_Use]]:
    """Variants of the same methods that only change the photos, or only the class, run together."""

    def kind(use: _Use) -> tuple[Any, ...]:
        variant = use.variant
        alone = (
            variant.model
            or variant.wrap
            or (variant.classes is not None and variant.images is not None)
        )
        return variant if alone else None, variant.classes is None, *use.metrics

    for _, group in groupby(uses, kind):
        while batch := list(islice(group, max(1, AT_ONCE // images))):
            yield batch


def _run(
    variants: Sequence[Variant],
    methods: Mapping[str, EvaluatedMethod],
    context: ModelContext,
    target: Target,
    options: Options,
) -> list[dict[str, VariantResult]]:
    """The maps of the methods in each variant; the variants run as one batch, or as classes of
    one."""
    first = variants[0]
    count = len(context.images)
    model = context.model if first.model is None else first.model(context)
    prefix = "" if first.model is None else first.model.prefix
    # a copy has none
    altered = () if first.model is None or prefix else active_interventions(context.model)
    # of a region or box, or of the photo
    of_classes = target.of_classes if context.classes is None else ClassTarget
    classes = [of_classes(each.classes) for each in variants if each.classes is not None]
    changed = variants[:1] if classes else variants
    images = torch.cat([context.changed(each.images) for each in changed])
    inputs = context.inputs
    if len(changed) > 1 or first.images is not None:
        owners = torch.arange(count, device=images.device).repeat(len(changed))
        inputs = inputs.rows(owners, {inputs.path: images.to(inputs.x)})
        target = target.rows(owners) if len(changed) > 1 else target
    results: list[dict[str, VariantResult]] = [{} for _ in variants]
    for layers, names in _by_layers(methods).items():
        objects = [methods[name].method for name in names]
        if first.wrap is not None:
            objects = [replace(first.wrap, method=method) for method in objects]
        where = None if layers is None else [prefix + layer for layer in layers]
        settings: Any = {**options, "layer": where, "progress": None}
        with muted(), intervene(model, altered):
            attributions = attribute(
                model, inputs, objects, targets=classes or [target], **settings
            )
        for name, method in zip(names, objects, strict=True):
            for number, result in enumerate(results):
                rows = slice(None) if classes else slice(number * count, (number + 1) * count)
                own = attributions[number if classes else 0][method.name][rows]
                maps = Maps.of(name, own, images[rows])
                result[name] = VariantResult(maps, images[rows], own.score, own.logits)
    return results


def _by_layers(methods: Mapping[str, EvaluatedMethod]) -> dict[tuple[str, ...] | None, list[str]]:
    """Methods of the same layers run together; those without a layer run with any of them.

    A method that explained the input, and would explain a layer where one is named, runs alone.
    """
    groups: dict[tuple[str, ...] | None, list[str]] = {}
    for name, method in methods.items():
        layer = method.attribution.layer
        groups.setdefault((layer,) if isinstance(layer, str) else layer, []).append(name)
    without = groups.pop(None, [])
    first = next(iter(groups), None)
    for name in without:
        alone = first is None or methods[name].method.layer_optional
        groups.setdefault(None if alone else first, []).append(name)
    return groups
