"""Recordings of many architectures: is what was recorded what the network computes?

    python examples/recording_matrix.py [--package torchvision timm transformers] [--match resnet]

Each network has random weights, in float64. A pass is recorded on one image and replayed on
another; the output and the gradient in the image are compared with the network's own, relative to
their largest value. "unseen" is what left the record. Exit code 1 if one is off by more than 1e-10.
"""

from __future__ import annotations

import argparse
import fnmatch
import sys
import warnings
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from explain._utils import nested
from explain.hooks import record

LARGE = {"inception_v3": 96, "maxvit_t": 224, "vit_*": 224}
TIMM = [
    "resnet10t",
    "resnetv2_50",
    "efficientnet_b0",
    "tf_efficientnetv2_b0",
    "mobilenetv3_small_050",
    "mnasnet_050",
    "fbnetc_100",
    "ghostnet_050",
    "hardcorenas_a",
    "densenet121",
    "dla34",
    "dpn48b",
    "vovnet19_ese_slim",
    "hrnet_w18_small",
    "inception_v4",
    "regnety_002",
    "rexnetr_200",
    "repvgg_a0",
    "selecsls42",
    "skresnet18",
    "seresnet18",
    "ecaresnet26t",
    "xception41p",
    "res2net50_14w_8s",
    "convnext_atto",
    "convmixer_768_32",
    "poolformer_s12",
    "mixer_s32_224",
    "gmlp_ti16_224",
    "resmlp_12_224",
    "vit_tiny_patch16_224",
    "deit3_small_patch16_224",
    "beit_base_patch16_224",
    "cait_xxs24_224",
    "swin_tiny_patch4_window7_224",
    "swinv2_tiny_window8_256",
    "coat_tiny",
    "coatnet_nano_rw_224",
    "crossvit_tiny_240",
    "edgenext_xx_small",
    "efficientformer_l1",
    "eva02_tiny_patch14_224",
    "fastvit_t8",
    "focalnet_tiny_srf",
    "gcvit_xxtiny",
    "levit_128s",
    "maxvit_tiny_tf_224",
    "mobilevit_xxs",
    "mvitv2_tiny",
    "nest_tiny",
    "pit_ti_224",
    "pvt_v2_b0",
    "repvit_m1",
    "sequencer2d_s",
    "tnt_s_patch16_224",
    "twins_svt_small",
    "visformer_tiny",
    "volo_d1_224",
    "xcit_nano_12_p16_224",
    "lambda_resnet26t",
    "halonet26t",
    "botnet26t_256",
    "nfnet_f0",
    "cs3darknet_s",
]


def of_torchvision() -> Iterator[tuple[str, Callable[[], nn.Module], int]]:
    import torchvision

    for name in torchvision.models.list_models(torchvision.models):
        sizes = [size for pattern, size in LARGE.items() if fnmatch.fnmatch(name, pattern)]
        size = sizes[0] if sizes else 64
        if not name.startswith(("vit_l", "vit_h", "regnet_y_128", "convnext_large", "swin_v2_b")):
            options = {"init_weights": False} if name in ("inception_v3", "googlenet") else {}

            def make(name: str = name, options: dict[str, bool] = options) -> nn.Module:
                return torchvision.models.get_model(name, weights=None, **options)

            yield name, make, size


def of_timm() -> Iterator[tuple[str, Callable[[], nn.Module], int]]:
    import timm

    for name in filter(timm.is_model, TIMM):
        config = timm.get_pretrained_cfg(name)
        is_fixed = config is not None and (config.fixed_input_size or "halo" in name)
        end = name.rpartition("_")[2]
        size = int(end) if end in ("224", "240", "256") else 128

        def make(name: str = name) -> nn.Module:
            return timm.create_model(name, pretrained=False)

        yield name, make, config.input_size[-1] if is_fixed else size


PACKAGES = {"torchvision": of_torchvision, "timm": of_timm}


def largest(tensors: dict[nested.Path, Tensor], expected: dict[nested.Path, Tensor]) -> float:
    """Return the largest difference from what is expected, by the largest value of that."""
    return max(
        float((tensors[path] - tensor).abs().max() / tensor.abs().max().clamp(min=1e-300))
        for path, tensor in expected.items()
        if tensor.numel()
    )


def check(model: nn.Module, size: int) -> tuple[int, float, float, str]:
    """Record a network, and return its operations, how far output and gradient are off, and what
    left the record."""
    for parameter in model.parameters():
        if not parameter.any():
            nn.init.normal_(parameter, std=0.1)  # a head of zeros would hide everything
    x, other = (torch.rand(1, 3, size, size, dtype=torch.float64) for _ in range(2))
    recording = record(model, x)
    runs = []
    for run in (recording.replay, model):
        image = other.clone().requires_grad_()
        output = {p: t for p, t in nested.paths(run(image)) if t.is_floating_point()}
        total = sum(tensor.sin().sum() for tensor in output.values())
        (gradient,) = torch.autograd.grad(total, image)
        runs.append((output, gradient))
    (output, gradient), (expected, expected_gradient) = runs
    off = largest({(): gradient}, {(): expected_gradient})
    return len(recording), largest(output, expected), off, ", ".join(recording.unseen)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--package", nargs="+", default=list(PACKAGES), choices=list(PACKAGES))
    parser.add_argument("--match", default="*")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    worst = 0.0
    count = 0
    print(f"{'network':<34}{'operations':>11}{'output':>10}{'gradient':>10}  unseen")
    for package in options.package:
        for name, make, size in PACKAGES[package]():
            if not fnmatch.fnmatch(name, f"*{options.match}*"):
                continue
            torch.manual_seed(0)
            model = make().double().eval()
            with sdpa_kernel(SDPBackend.MATH):
                steps, output, gradient, unseen = check(model, size)
            print(f"{name:<34}{steps:>11}{output:>10.1e}{gradient:>10.1e}  {unseen}", flush=True)
            worst = max(worst, output, gradient)
            count += 1
    print(f"{count} networks, off by {worst:.1e} at most")
    return int(worst > 1e-10)


if __name__ == "__main__":
    sys.exit(main())
