"""
Full-backward hooks, by hand
============================

Grad-CAM, guided backpropagation and saliency are a few lines with PyTorch's own hooks.
A forward hook keeps the feature maps, a full-backward hook keeps their gradient, and
the ``grad_input`` that a full-backward hook of a ReLU returns replaces the gradient of
its input. The values are those of ``explain``, to rounding.
"""

# %%
# First PyTorch alone. The photo is a tensor that requires a gradient.

import sys
import tempfile
import textwrap
from pathlib import Path

import torch
from torch import nn
from torchvision.models import resnet18

import explain
from explain.hooks import HookGroup
from explain.methods import GradCAM, GuidedBackprop, Saliency
from explain.render.sheets import Tile, table

assets = Path(sys.argv[0]).resolve().parents[2] / "assets"
photo = assets / "chelsea.png"
explainer = explain.Explainer(crop="whole")
model = explainer.model
x = explainer.as_input(photo).requires_grad_()

# %%
# All hooks come before the forward pass: a full-backward hook acts only for calls of
# its module that come after it. Of the layer, ``grad_output`` is the gradient of its
# feature maps. Of the model, ``grad_input`` is the gradient of the photo.

kept = {}


def keep_maps(module, args, output):
    kept["maps"] = output.detach()


def keep_gradient(module, grad_input, grad_output):
    kept["gradient"] = grad_output[0]


def keep_pixels(module, grad_input, grad_output):
    kept["pixels"] = grad_input[0]


layer = "features"
handles = [
    model.get_submodule(layer).register_forward_hook(keep_maps),
    model.get_submodule(layer).register_full_backward_hook(keep_gradient),
    model.register_full_backward_hook(keep_pixels),
]
score, target = model(x)[0].max(0)
torch.autograd.grad(score, x)  # it leaves the weights' gradients alone
for handle in handles:
    handle.remove()

weights = kept["gradient"].mean((2, 3), keepdim=True)
by_hand = {
    "gradcam": (weights * kept["maps"]).sum(1).clamp(min=0),
    "saliency": kept["pixels"].abs(),
}
print(explainer.categories[int(target)])

# %%
# For guided backpropagation, every ReLU sends back only what is positive. This network
# has ReLU6, which counts as one.


def clamp(module, grad_input, grad_output):
    return (grad_input[0].clamp(min=0),)


handles = [
    module.register_full_backward_hook(clamp)
    for module in model.modules()
    if isinstance(module, nn.ReLU6)
]
score = model(x)[0, target]
(by_hand["guidedbackprop"],) = torch.autograd.grad(score, x)
for handle in handles:
    handle.remove()

# %%
# The same from ``explain``: as it is by default, and with full-backward hooks of its own.

ways = {
    "default": ["gradcam", "saliency", "guidedbackprop"],
    "full-backward hooks": [
        GradCAM(gradients="full_backward"),
        Saliency(gradients="full_backward"),
        GuidedBackprop(gradients="full_backward"),
    ],
}
for way, methods in ways.items():
    explanation = explainer(photo, methods, layer=layer)
    for name, values in by_hand.items():
        difference = (explanation[name].values - values).abs().max()
        share = difference / values.abs().max()
        print(f"{way}, {name}: differs from that by hand by {share:.0e} of the maximum")
        assert share < 1e-4

# %%
# Three overlays, each in a file.

folder = Path(tempfile.mkdtemp())
overlays = {name: explanation.overlay(name) for name in by_hand}
for name, overlay in overlays.items():
    overlay.save(folder / f"{name}.png")
print(sorted(path.name for path in folder.iterdir()))
table([[Tile(overlay) for overlay in overlays.values()]], list(overlays))

# %%
# PyTorch refuses such hooks where a hooked module works in place; those of a
# ``HookGroup`` take the same functions, do not mind, and go by themselves.

resnet = resnet18(num_classes=5).eval()  # its ReLUs work in place
pixels = x.detach().requires_grad_()
with HookGroup(resnet) as group:
    group.backward(nn.ReLU, clamp)
    (guided,) = torch.autograd.grad(resnet(pixels)[0, 1], pixels)
default = explain.attribute(resnet, x.detach(), "guidedbackprop", target=1).values
print(f"differs by {(default - guided).abs().max() / guided.abs().max():.0e}")

# %%
# But no hook on modules sees functions such as ``torch.relu``. Then the option says so,
# in one line. The default works there, too.


class Functional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x):
        return torch.relu(self.conv(x)).mean((2, 3))


try:
    explain.attribute(
        Functional(), x.detach(), GuidedBackprop(gradients="full_backward"), target=1
    )
except explain.MethodError as error:
    print(textwrap.fill(str(error), 80))
