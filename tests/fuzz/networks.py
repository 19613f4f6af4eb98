"""Every method on random networks: what may be drawn, and what must hold.

`cases` draws a `Case`: a program, images, a layer, a target, and the state in which a caller hands
them over. `check` explains it by every method and says what came of it; nothing of it may differ
from the plain computation on the same program without anything in place, and nothing may be left
behind.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import explain
from explain import ExplainError, ExplainWarning
from explain.hooks.layer_names import place_of
from explain.methods import LRP, DeepLIFT, DeepLIFTSHAP
from explain.relevance import COMPOSITES
from tests.conftest import layer_for, registered_backwards, snapshot
from tests.fuzz.expected import METHODS, MOST_PLACES, NotLinearError, Slow, class_weights
from tests.fuzz.programs import Network, Program, Step, scores_in, sees, shapes
from tests.fuzz.pure import Pure
from tests.fuzz.sketch import programs

Target = int | tuple[int, ...] | str | None


@dataclass(frozen=True)
class Case:
    """A program, and how it is asked: by whom, for what, and in which state everything is."""

    program: Program
    images: int = 1
    layer: str | None = None
    target: Target = None
    """A class, one for each image, "callable", or None for the best."""
    mode: str = "grad"
    """The caller's: "grad", "no_grad" or "inference"."""
    training: bool = False
    frozen: str = "none"
    """Which parameters do not require a gradient: "none", "some" or "all"."""
    gradients: bool = False
    """Whether parameters have one from before."""
    layout: str = "plain"
    """How the images lie in memory: "plain", "channels_last" or "sliced"."""
    leaf: bool = False
    """Whether the images themselves require a gradient."""
    backwards: bool = False
    """Whether the modules are registered in reverse."""
    seed: int = 0


NOISE = 1e-13
"""Scores below are rounding errors: an average after an instance normalisation is zero whatever the
image."""
ONLY_NOISE = "the score is nothing but rounding errors"


@st.composite
def cases(draw: Any, most_steps: int = 9) -> Case:
    program = draw(programs(most_steps))
    layers = places(program)
    maps = [name for name, place in layers.items() if is_map(program, place)]
    used = [name for name in maps if layers[name] in read_for_scores(program)]
    images = draw(st.integers(1, 3))
    one = st.integers(0, shapes(program)[-1][0] - 1)
    target = st.one_of(st.none(), one, st.tuples(*[one] * images), st.just("callable"))
    return Case(
        program,
        images,
        layer=draw(st.sampled_from([None, *used * 8, *maps, *layers])),
        target=draw(target),
        mode=draw(st.sampled_from(["grad", "grad", "no_grad", "inference"])),
        training=draw(st.booleans()),
        frozen=draw(st.sampled_from(["none", "some", "all"])),
        gradients=draw(st.booleans()),
        layout=draw(st.sampled_from(["plain", "plain", "channels_last", "sliced"])),
        leaf=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
        backwards=draw(st.booleans()),
    )


@lru_cache(maxsize=64)
def places(program: Program) -> dict[str, int]:
    """Which value each layer's name stands for: what its last call gave that saw the explained
    image."""
    count = len(program.inputs)
    found = {}
    seeing = sees(program)
    for name, module in Network(program).named_modules(remove_duplicate=False):
        number = re.fullmatch(r"(?:b\d+\.)?[mt](\d+)", name)
        if number and not any(module.children()):
            i = int(number[1])
            calls = [count + j for j, step in enumerate(program.steps) if i in (j, step.again)]
            found |= {f"{name}@{k}": place for k, place in enumerate(calls)}
            found[name] = max([place for place in calls if place in seeing] or calls)
    return found | {f"b{start}": count + stop - 1 for start, stop, _ in program.blocks}


def is_map(program: Program, place: int) -> bool:
    shape = shapes(program)[place]
    return len(shape) == 3 and shape[1] * shape[2] > 1


def read_for_scores(program: Program) -> set[int]:
    """The values that lead to the scores."""
    count = len(program.inputs)
    found = {count + len(program.steps) - 1}
    for i in reversed(range(len(program.steps))):
        if count + i in found:
            found |= set(program.steps[i].of)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# What must hold


@dataclass
class Figures:
    """What came of many cases."""

    programs: int = 0
    compared: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    unsteady: Counter[str] = field(default_factory=Counter)
    """Where the plain computation itself changes as much when the last digits of all values do."""
    skipped: Counter[str] = field(default_factory=Counter)
    deviation: dict[str, float] = field(default_factory=dict)
    failures: list[tuple[str, Case]] = field(default_factory=list)


class Failure(AssertionError):
    """What must hold does not; the message says what, and the case is there to paste."""


class Ready:
    """A case, built: the model and images in the state that it says, and the plain network for each
    image."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.program = case.program
        self.alone: dict[str, Tensor] = {}
        self.model = Network(case.program).train(case.training)
        if case.backwards:
            registered_backwards(self.model)
        g = torch.Generator().manual_seed(case.seed)
        inputs = [
            torch.randn(case.images, *shape, generator=g, dtype=torch.float64)
            for shape in case.program.inputs
        ]
        self.x = laid_out(inputs[0], case.layout)
        self.beside = inputs[1:]
        self.x.requires_grad_(case.leaf)
        self.places = places(case.program)
        for i, parameter in enumerate(self.model.parameters()):
            trained = case.frozen == "none" or (case.frozen == "some" and i % 2 == 0)
            parameter.requires_grad_(trained)
            if case.gradients and i % 3 != 1:
                parameter.grad = torch.randn(parameter.shape, generator=g, dtype=torch.float64)
        plain_score = score if case.target == "callable" else None
        self.networks = [
            Pure(self.model, image, [other[i] for other in self.beside], plain_score)
            for i, image in enumerate(self.x.detach())
        ]

    def raises_alone(self) -> bool:
        """Whether the network does not even run: a view of images that lie in another layout."""
        inputs = [x.clone() for x in (self.x, *self.beside)]
        try:
            with torch.no_grad():
                Network(self.program).eval()(*inputs)
        except RuntimeError as error:
            if "view" not in str(error):
                raise
            return True
        return False

    def step_at(self, place: int) -> Step:
        """The step that gave a value."""
        return self.program.steps[place - len(self.program.inputs)]

    @cached_property
    def scores(self) -> list[Tensor]:
        """The scores of each image by the plain computation."""
        pairs = zip(self.networks, self.x, strict=True)
        return [network.forward(x)[-1] for network, x in pairs]

    @cached_property
    def asked(self) -> Target:
        """The target; where the best class is a tie, which the last digits decide, the first
        one."""
        best = [scores.topk(min(2, len(scores))).values for scores in self.scores]
        tied = any(len(pair) > 1 and float(pair[0] - pair[1]) < 1e-9 for pair in best)
        return 0 if self.case.target is None and tied else self.case.target

    @property
    def target(self) -> Any:
        if self.asked == "callable":
            return score
        return torch.tensor(self.asked) if isinstance(self.asked, tuple) else self.asked

    @cached_property
    def classes(self) -> list[int]:
        """The class of each image by the plain computation; a callable's is the only one."""
        if self.asked is None:
            return [int(scores.argmax()) for scores in self.scores]
        if isinstance(self.asked, tuple):
            return list(self.asked)
        return [self.asked if isinstance(self.asked, int) else 0] * len(self.x)

    def attribute(self, method: Any, images: int | None = None, **changes: Any) -> Any:
        """Explain in the state that the case says, refused or not; nothing else may be raised."""
        target = self.target[:images] if isinstance(self.target, Tensor) else self.target
        options = {"target": target, "layer": layer_for(method, self.case.layer)} | changes
        options["placement"] = "even"  # as the plain computations lay maps over the photo
        with quietly(), caller(self.case.mode):
            try:
                return explain.attribute(self.model, self.inputs(images), method, **options)
            except ExplainError:
                raise
            except Exception as error:
                raise Failure(f"{method}: raised {type(error).__name__}: {error}") from error

    def inputs(self, images: int | None = None) -> Any:
        """What the model is called with: the images alone, or with what else it takes, in one form
        or another."""
        if not self.beside:
            return self.x if images is None else self.x[:images]
        together = tuple(x[:images] for x in (self.x, *self.beside))
        return together if self.case.seed % 2 else explain.Inputs(together, explained=0)

    def plainly(self, slow: Slow, layers: Any) -> Tensor:
        rows = zip(self.networks, self.x, self.classes, strict=True)
        return torch.stack([slow(network, x, c, layers) for network, x, c in rows]).detach()


def score(output: Any) -> Tensor:
    """A callable target: any function of the scores."""
    scores = scores_in(output)
    return (scores * torch.arange(1, scores.shape[1] + 1).to(scores).cos()).sum(1) + 0.1 * (
        scores**2
    ).sum(1)


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "channels_last":
        return x.contiguous(memory_format=torch.channels_last)
    return torch.stack([x, x + 1], -1)[..., 0] if layout == "sliced" else x


@contextmanager
def quietly() -> Iterator[None]:
    """Any warning is an error but for those of an explanation: a random network may have nothing to
    say."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ExplainWarning)
        yield


@contextmanager
def caller(mode: str) -> Iterator[None]:
    with torch.inference_mode() if mode == "inference" else torch.set_grad_enabled(mode == "grad"):
        yield


def check(
    case: Case, methods: Sequence[str] = tuple(METHODS), figures: Figures | None = None
) -> Figures:
    """Explain a case by the methods named, and note in the figures what came of it; a failure is
    one of these.

    Raises:
        Failure: something does not hold, and no figures were given to note it in.
    """
    noted = Figures() if figures is None else figures
    noted.programs += 1
    ready = Ready(case)
    if ready.raises_alone():
        noted.skipped["the model alone raises"] += len(methods)
        return noted
    for prove in [*[_one(name) for name in methods], _together, _relevance, _differences]:
        try:
            prove(ready, noted)
        except Failure as failure:
            if figures is None:
                raise
            noted.failures.append((str(failure), case))
    return noted


def _one(name: str) -> Callable[[Ready, Figures], None]:
    def prove(ready: Ready, figures: Figures) -> None:
        with _left_as_found(ready, name):
            try:
                a = ready.attribute(METHODS[name][0])
            except ExplainError as error:
                return _accept(ready, name, str(error), figures)
        ready.alone[name] = a.values
        return _compare(ready, name, a, figures)

    return prove


@contextmanager
def _left_as_found(ready: Ready, name: str) -> Iterator[None]:
    def state() -> dict[str, Any]:
        x = ready.x
        values = x.detach().clone().numpy().tobytes()
        of_input = (values, x._version, x.requires_grad, x.grad, x.stride())
        return snapshot(ready.model) | {"the input": of_input}

    start = state()
    yield
    end = state()
    changed = [part for part in start if start[part] != end[part]]
    if changed:
        raise Failure(f"{name}: left something changed: {', '.join(changed)}")


def _accept(ready: Ready, name: str, message: str, figures: Figures) -> None:
    """Note a refusal; it must be one line, and true."""
    if "\n" in message or "; " not in message:
        raise Failure(f"{name}: unclear refusal: {message}")
    kind = next((kind for kind, pattern in REFUSALS.items() if re.search(pattern, message)), None)
    if kind is None:
        raise Failure(f"{name}: unknown refusal: {message}")
    if ready.case.layer is not None and _is_left_open(ready, ready.case.layer):
        figures.skipped[LEFT_OPEN] += 1
        return
    if not _justified(ready, name, kind):
        raise Failure(f"{name}: refused without need: {message}")
    figures.refused[kind] += 1


LEFT_OPEN = "what is a channel is left open by shapes, and no module says it"
REFUSALS = {
    "no attention in the network": (
        "(legrad|rollout|cheferattribution|cheferbimodal|gradeclip) must have"
    ),
    "the layer gives no map": "must give a (spatial map|map of several positions)",
    "nothing tells how the layer's map lies": "must give a map whose layout is clear",
    "no layer gives a map": "layer must be given for this model",
    "the score does not depend on the layer": "layer .* must influence the score",
    "no gradient leads from the layer to the input": "operations for its relevance",
    "the score does not depend on the input": "must depend on the input through differentiable",
    "no class for a method that needs one": "target must be a class",
    "no second class to compare with": "target must have another class",
    "no average and linear layer for cam": "must be followed by an average over its maps",
}


def _justified(ready: Ready, name: str, kind: str) -> bool:
    """Whether a refusal says the truth, by the plain computation."""
    place = ready.places.get(ready.case.layer or "")
    classes = ready.classes
    if kind == "the layer gives no map":
        return place is not None and not is_map(ready.program, place)
    if kind == "nothing tells how the layer's map lies":
        return place is not None and ready.step_at(place).op not in ("conv", "pool", "norm")
    if kind == "no gradient leads from the layer to the input":
        return place not in sees(ready.program, by_gradient=True)
    if kind == "the score does not depend on the input":
        return any(_gradients(ready, i, c)[0] is None for i, c in enumerate(classes))
    if kind == "the score does not depend on the layer" and place is not None:
        return ready.step_at(place).style == "no_grad" or any(
            _gradients(ready, i, c)[place] is None for i, c in enumerate(classes)
        )
    if kind == "no class for a method that needs one":
        return ready.case.target == "callable"
    if kind == "no second class to compare with":
        return shapes(ready.program)[-1] == (1,) and name.startswith("finercam")
    if kind == "no average and linear layer for cam" and place is not None:
        pairs = zip(ready.networks, ready.x, strict=True)
        return any(class_weights(network, x, place - 1) is None for network, x in pairs)
    if kind == "no layer gives a map":
        return not any(is_map(ready.program, p) for p in ready.places.values())
    if kind == "the score does not depend on the layer":
        used = read_for_scores(ready.program) & sees(ready.program)
        return not any(is_map(ready.program, place) for place in used & set(ready.places.values()))
    return kind == "no attention in the network" or place is None


def _gradients(ready: Ready, image: int, target: int) -> list[Tensor | None]:
    return ready.networks[image].maybe_gradients(ready.x[image], target)


def _compare(ready: Ready, name: str, a: explain.Attribution, figures: Figures) -> None:
    """Hold a result against the plain computation at the layer that it says it looked at."""
    if not torch.isfinite(a.values).all():
        raise Failure(f"{name}: values are not finite")
    names = a.layer if isinstance(a.layer, tuple) else (a.layer,)
    layers = [layer for layer in names if layer is not None]
    seen = [ready.places[layer] for layer in layers]
    skip = None
    if name == "kpcacam" and a.values[0].numel() > MOST_PLACES:
        skip = f"{name} on more than {MOST_PLACES} places"
    if any(_is_left_open(ready, layer) for layer in layers):
        skip = LEFT_OPEN
    if name in ("lrp", "attnlrp") and not set(seen) <= sees(ready.program):
        skip = "relevance of a layer that the image does not lead to"
    if skip is not None:
        figures.skipped[skip] += 1
        return
    classes = ready.classes
    if isinstance(a.target, Tensor) and a.target.tolist() != classes:
        raise Failure(f"{name}: explains classes {a.target.tolist()} instead of {classes}")
    scores = torch.stack([row[c] for row, c in zip(ready.scores, classes, strict=True)])
    if deviation(a.score, scores) > 1e-9:
        raise Failure(f"{name}: scores {a.score.tolist()} instead of {scores.tolist()}")
    at: Any = [place - 1 for place in seen]
    if name != "refinecam":
        at = at[0] if at else None
    slow = METHODS[name][1]
    try:
        expected = ready.plainly(slow, at)
    except NotLinearError:
        raise Failure(f"{name}: explains a head that is no average and linear layer") from None
    if a.values.shape != expected.shape:
        shapes = f"{tuple(a.values.shape)} instead of {tuple(expected.shape)}"
        raise Failure(f"{name}: shape {shapes}")
    off = deviation(a.values, expected)
    if off <= 1e-8:
        figures.compared[name] += 1
        figures.deviation[name] = max(off, figures.deviation.get(name, 0.0))
    elif not expected.isfinite().all():
        figures.unsteady[name] += 1  # a quotient of nothing by nothing
    elif _moves(ready, slow, at, expected) > 0.01 * off or (
        name == "fullgrad" and _rescales_noise(ready)
    ):
        figures.unsteady[name] += 1
    else:
        most = float(expected.abs().max())
        raise Failure(f"{name} at {a.layer}: off by {off:.1e} of the maximum, {most:.1e}")


def _rescales_noise(ready: Ready) -> bool:
    """Whether a layer adds nothing, or rounding errors, which FullGrad brings to [0, 1] as it does
    every layer."""
    for network, x, c in zip(ready.networks, ready.x, ready.classes, strict=True):
        sizes = [float(term.detach().abs().max()) for term in network.terms(x, c)]
        if min(sizes) < 1e-12 * max(sizes):
            return True
    return False


def _is_left_open(ready: Ready, layer: str) -> bool:
    """Whether a layer that has no layout of its own is taken to have its channels last, by the
    shape of its map."""
    place = place_of(layer)
    module = ready.model.get_submodule(place.layer)
    name = next(name for name, other in ready.model.named_modules() if other is module)
    calls = [c for c in explain.list_layers(ready.model, ready.inputs()) if c.name == name]
    grid = calls[-1 if place.call is None else place.call].grid
    step = ready.step_at(ready.places[layer])
    last = step.op == "norm" and step.options[0] == "layer" and not name.startswith("b")
    return grid is not None and grid.layout == "NHWC" and not last


def deviation(values: Tensor, expected: Tensor) -> float:
    """The largest difference, by each image's largest magnitude; with a floor: 1e-12 is nothing."""
    off = (values - expected).reshape(len(values), -1).abs().amax(1)
    most = expected.reshape(len(values), -1).abs().amax(1)
    return float((off / (most + 1e-4)).max())


def _moves(ready: Ready, slow: Slow, at: Any, expected: Tensor) -> float:
    """By how much the plain computation changes when the last digits of every value do: at a tie,
    or a pole."""
    most = 0.0
    for seed in range(3):
        for network in ready.networks:
            network.jitter = torch.Generator().manual_seed(seed)
        most = max(most, deviation(ready.plainly(slow, at), expected))
    for network in ready.networks:
        network.jitter = None
    return most


SAME_NAME = ("gradcam signed", "finercam weighted", "shapleycam of a logit")
"""Two methods of one name cannot be asked for together."""


def _together(ready: Ready, figures: Figures) -> None:
    """All methods asked for together give what each gives alone, and the same bits a second
    time."""
    alone = {name: values for name, values in ready.alone.items() if name not in SAME_NAME}
    if not alone:
        return
    methods = [METHODS[name][0] for name in alone]
    try:
        first = ready.attribute(methods)
        second = ready.attribute(methods)
    except ExplainError as error:
        raise Failure(f"together: refused: {error}") from error
    for name, values in alone.items():
        if not torch.equal(first[name].values, second[name].values):
            raise Failure(f"{name}: differs when it is run again")
        off = deviation(first[name].values, values)
        if off > 1e-8:
            raise Failure(f"{name}: differs when asked for with others, by {off:.1e}")
    figures.compared["together, twice"] += 1


COMPOSED = tuple(name for name in COMPOSITES if name not in ("automatic", "Gradient", "AttnLRP"))


def _propagated(ready: Ready, method: Any, figures: Figures) -> explain.Attribution | None:
    """Explain the photo by propagation; None where that is refused, or there is nothing to hold it
    against."""
    if ready.case.target == "callable":
        return None  # what is done with the scores is no step of the network
    with _left_as_found(ready, method.name):
        try:
            a = ready.attribute(method, layer=None)
        except ExplainError as error:
            figures.refused[str(error).partition(",")[0]] += 1
            return None
    if bool((a.score.abs() < NOISE).any()):
        figures.skipped[ONLY_NOISE] += 1
        return None
    return a


def _relevance(ready: Ready, figures: Figures) -> None:
    """By two composites: what is taken and what arrives are the score; the same for an image alone;
    nothing is left."""
    for turn in (0, 1):
        composite = COMPOSED[(ready.case.seed + turn * ready.program.seed) % len(COMPOSED)]
        method = LRP(composite)
        a = _propagated(ready, method, figures)
        if a is None:
            continue
        taken = sum((part.abs() for part in a.coverage.taken.values()), a.score.abs())
        off = float((a.delta.abs() / (a.values.abs().flatten(1).sum(1) + taken)).max())
        if off > 1e-8:
            if _amplifies_noise(ready, method, a.values, off):
                figures.unsteady[f"lrp {composite}"] += 1
                continue
            raise Failure(f"lrp {composite}: misses the score by {off:.1e}")
        named = sum(count for name, count in a.coverage.missed.items() if "::" in name)
        operators = _operators(ready)
        if not _hides(ready) and named != operators:
            raise Failure(f"lrp {composite}: names {named} of {operators} operators without a rule")
        alone = ready.attribute(method, images=1, layer=None)
        if deviation(a.values[:1], alone.values) > 1e-6:
            raise Failure(f"lrp {composite}: differs when asked of one image")
        figures.compared["relevance, conserved"] += 1


def _amplifies_noise(ready: Ready, method: Any, values: Tensor, off: float) -> bool:
    """Whether relevance changes as much as it misses the score by when the last digits of the image
    do: a rule without biases shares the score out among rounding errors, such as the average of
    what an instance normalisation gives."""
    x = ready.x
    g = torch.Generator().manual_seed(ready.case.seed)
    ready.x = x.detach() * (1 + 1e-15 * torch.randn(x.shape, generator=g, dtype=x.dtype))
    changed = ready.attribute(method, layer=None).values
    ready.x = x
    return deviation(changed, values) > 0.01 * off


def _differences(ready: Ready, figures: Figures) -> None:
    """DeepLIFT's values add up to the difference of the scores, by the plain computation of both;
    nothing is left."""
    g = torch.Generator().manual_seed(ready.case.seed)
    baselines = torch.randn(2, *ready.x.shape[1:], generator=g, dtype=torch.float64)
    baselines = baselines if ready.program.seed % 2 else baselines[:1]
    method = DeepLIFTSHAP(baselines) if len(baselines) > 1 else DeepLIFT(baselines[0])
    a = _propagated(ready, method, figures)
    if a is None:
        return
    of_baselines = [
        sum(network.forward(baseline)[-1][c] for baseline in baselines) / len(baselines)
        for network, c in zip(ready.networks, ready.classes, strict=True)
    ]
    scores = [row[c] for row, c in zip(ready.scores, ready.classes, strict=True)]
    missed = a.values.flatten(1).sum(1) - (torch.stack(scores) - torch.stack(of_baselines))
    scale = a.values.abs().flatten(1).sum(1) + a.score.abs()
    if bool(((missed - a.delta).abs() > 1e-8 * scale).any()):
        raise Failure(f"{method.name}: delta {a.delta.tolist()} instead of {missed.tolist()}")
    off = float((missed.abs() / scale).max())
    if not _hides(ready) and off > 1e-7:
        raise Failure(f"{method.name}: misses the difference by {off:.1e}")
    figures.compared["differences, delta told" if _hides(ready) else "differences, added up"] += 1


def _operators(ready: Ready) -> int:
    """How many operators with a derivative of their own lie between the image and the scores: what
    is composed of others is these."""
    way = read_for_scores(ready.program) & sees(ready.program)
    count = len(ready.program.inputs)
    steps = enumerate(ready.program.steps, start=count)
    return sum(step.style == "operator" for place, step in steps if place in way)


def _hides(ready: Ready) -> bool:
    """Whether the scores depend on the image in a way that no gradient sees."""
    way = read_for_scores(ready.program) & sees(ready.program)
    count = len(ready.program.inputs)
    return any(
        step.op == "detach" or step.style == "no_grad"
        for place, step in enumerate(ready.program.steps, start=count)
        if place in way
    )
