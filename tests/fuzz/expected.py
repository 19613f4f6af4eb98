"""Every method's plain computation, asked of a `Pure` network: what an explanation must equal."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from explain import methods
from explain.methods.base import MethodLike
from explain.methods.wrappers import noise
from explain.relevance.composites import attn_lrp
from tests.fuzz.pure import Pure
from tests.methods import plain, plain_factors, plain_masks, plain_paths, plain_scores, plain_steps

Slow = Callable[[Pure, Tensor, int, int], Tensor]  # network, image, class, layer -> values


def pixels(slow: Callable[..., Tensor]) -> Slow:
    return lambda network, x, target, layer: slow(network, x, target)


def cam(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    activation = network.forward(x)[layer + 1]
    weights = class_weights(network, x, layer)
    if weights is None:
        raise NotLinearError
    return plain.weighted(list(weights[target]), activation, relu=False)


class NotLinearError(Exception):
    """The scores are no linear function of the means of the layer's maps."""


def class_weights(network: Pure, x: Tensor, layer: int) -> Tensor | None:
    """The weights ``(K, C)`` of the mean of each map in the scores, where a head is an average and
    one linear layer, or a convolution of one position and an average."""

    def means(place: int) -> Tensor:
        return torch.stack([plain.mean_of(channel) for channel in values[place]])

    def same(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and torch.allclose(a, b, rtol=1e-12, atol=1e-14)

    values = network.forward(x)
    steps = network.program.steps
    of_maps = means(layer + 1)
    if same(of_maps, values[-1]):
        return torch.eye(len(of_maps)).to(of_maps)
    if steps[-1].op == "linear" and same(values[steps[-1].of[0]], of_maps):
        return network.called[len(steps) - 1].weight.detach()
    for number, step in enumerate(steps):
        if step.op == "conv" and step.options[1:6] == ((1, 1), 1, 0, 1, 1):
            averaged = same(means(len(network.program.inputs) + number), values[-1])
            if averaged and same(means(step.of[0]), of_maps):
                return network.called[number].weight.detach().flatten(1)
    return None


def shapleycam(network: Pure, x: Tensor, target: int, layer: int, *, rest: bool = True) -> Tensor:
    """Weights ``mean(G - H A / 2)`` of ``y + log p``, or of ``y`` alone, where ``H A`` is the slope
    of the gradient along A."""
    activation = network.forward(x)[layer + 1]
    head = network[layer + 1 :]

    def slope(a: Tensor) -> Tensor:
        with torch.enable_grad():
            scores = head.scores(a)
            score = scores[target] + rest * scores.log_softmax(0)[target]
            return torch.autograd.grad(score, a, create_graph=True)[0]

    gradient, along = torch.autograd.functional.jvp(slope, activation, activation)
    weights = [plain.mean_of(g) for g in (gradient - along / 2).detach()]
    return plain.weighted(weights, activation, relu=True)


def randomcam(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    channels = len(plain.forward(network, x)[layer + 1])
    weights = torch.rand(channels, generator=torch.Generator().manual_seed(0)) * 2 - 1
    return plain.randomcam(network, x, target, layer, weights=weights.to(x))


def drawn(samples: int, x: Tensor) -> list[Tensor]:
    return [0.15 * (x.max() - x.min()) * noise(0, i, x) for i in range(samples)]


def smoothed(kind: str) -> Slow:
    def slow(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
        def gradient(z: Tensor) -> Tensor:
            return plain.backward(network, plain.forward(network, z), target)[0]

        return plain_paths.smooth(gradient, x, noise=drawn(2, x), kind=kind)

    return slow


def integrated(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    points, weights = plain_paths.quadrature("gausslegendre", 3)
    how = {"baseline": torch.zeros_like(x), "points": points, "weights": weights}
    return plain_paths.integratedgradients(network, x, target, **how)


def blurred(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    sigma = 0.2 * min(x.shape[1:])
    return plain_steps.blurintegratedgradients(network, x, target, steps=2, sigma=sigma)


def guided(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    how = {"baseline": torch.zeros_like(x), "steps": 2, "fraction": 0.25, "distance": 0.02}
    return plain_steps.along(network, target, plain_steps.guided(network, x, target, **how))


def by_direction(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    return plain_steps.idgi(network, target, plain_steps.straight(x, torch.zeros_like(x), 3))


def noisy_maps(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    maps = plain.forward(network, x)[layer + 1]
    span = torch.stack([m.max() - m.min() for m in maps])[:, None, None]
    return plain_masks.sscam(
        network, x, target, layer, noise=[0.15 * span * noise(0, i, maps[0]) for i in range(2)]
    )


def smoothgradcampp(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    return plain.smoothgradcampp(network, x, target, layer, noise=drawn(2, x))


def smoothed_cam(network: Pure, x: Tensor, target: int, layer: int) -> Tensor:
    return plain_paths.smooth(
        lambda z: plain.gradcam(network, z, target, layer), x, noise=drawn(2, x)
    )


def relevance(network: Pure, x: Tensor, target: int, layer: int | None) -> Tensor:
    """Value times gradient: activations as lines from zero, deviations and gates as constants,
    products in halves."""
    values = network.forward(x)
    gradients = network.backward(values, target, "relevance")
    return x * gradients[0] if layer is None else (values[layer + 1] * gradients[layer + 1]).sum(0)


AS_THEY_ARE: dict[str, Slow] = {
    "saliency": pixels(plain.saliency),
    "inputxgradient": pixels(plain.inputxgradient),
    "deconvnet": pixels(plain.deconvnet),
    "guidedbackprop": pixels(plain.guidedbackprop),
    "cam": cam,
    "guidedgradcam": plain.guidedgradcam,
    "gradcam": plain.gradcam,
    "gradcam++": plain.gradcampp,
    "xgradcam": plain.xgradcam,
    "hirescam": plain.hirescam,
    "elementwisecam": plain.elementwisecam,
    "layercam": plain.layercam,
    "eigencam": plain_factors.eigencam,
    "eigengradcam": plain_factors.eigengradcam,
    "kpcacam": plain_factors.kpcacam,
    "fem": plain_factors.fem,
    "lafam": plain_factors.lafam,
    "shapleycam": shapleycam,
    "finercam": plain_scores.finercam,
    "randomcam": randomcam,
    "fullgrad": pixels(plain_paths.fullgrad),
    "scorecam": plain_masks.scorecam,
    "ablationcam": plain_masks.ablationcam,
    "refinecam": plain_scores.refinecam,  # its layer is a list of them
}
REFUSED = (
    "legrad",
    "gradeclip",
    "rollout",
    "gradientrollout",
    "cheferattribution",
    "cheferbimodal",
)
"""Always: none of these networks has attention."""
METHODS: dict[str, tuple[MethodLike, Slow]] = {
    **{name: (name, slow) for name, slow in AS_THEY_ARE.items()},
    **{name: (name, plain.saliency) for name in REFUSED},
    "gradcam signed": (methods.GradCAM(relu=False), lambda *a: plain.gradcam(*a, relu=False)),
    "shapleycam of a logit": (
        methods.ShapleyCAM(residual_softmax=False),
        lambda *a: shapleycam(*a, rest=False),
    ),
    "smoothgradcam++": (methods.SmoothGradCAMPlusPlus(samples=2), smoothgradcampp),
    "smooth(gradcam)": (methods.Smooth(methods.GradCAM(), samples=2), smoothed_cam),
    "finercam weighted": (
        methods.FinerCAM(methods.GradCAMPlusPlus(), "weighted", 1.0, 2),
        lambda *a: plain_scores.finercam(
            *a, objective="weighted", alpha=1.0, references=2, base=plain.gradcampp_map
        ),
    ),
    "sscam": (methods.SSCAM(samples=2), noisy_maps),
    "iscam": (methods.ISCAM(steps=2), lambda *a: plain_masks.iscam(*a, steps=2)),
    "integratedgradients": (methods.IntegratedGradients(steps=3), integrated),
    "blurintegratedgradients": (methods.BlurIntegratedGradients(2), blurred),
    "guidedintegratedgradients": (methods.GuidedIntegratedGradients(2), guided),
    "idgi": (methods.IDGI(methods.IntegratedGradients(3)), by_direction),
    "smoothgrad": (methods.Smooth(samples=2), smoothed("mean")),
    "smoothgrad2": (methods.Smooth(samples=2, statistic="square"), smoothed("squared")),
    "vargrad": (methods.Smooth(samples=2, statistic="variance"), smoothed("variance")),
    "lrp": (methods.LRP("Gradient"), relevance),
    "attnlrp": (methods.LRP(attn_lrp(epsilon=0)), relevance),
}
RERUNS = frozenset(
    {
        "scorecam",
        "sscam",
        "iscam",
        "ablationcam",
        "smooth(gradcam)",
        "smoothgradcam++",
        "smoothgrad",
        "smoothgrad2",
        "vargrad",
        "integratedgradients",
        "kpcacam",
        "blurintegratedgradients",
        "guidedintegratedgradients",
        "idgi",
    }
)
CHEAP = tuple(name for name in METHODS if name not in RERUNS)
MOST_PLACES = 16  # the plain kernel method compares each place with each
