"""Every classifier of torchvision, for photos and videos, and families of timm and Hugging Face, by
five methods each.

    python examples/model_matrix.py [--source torchvision|video|timm|transformers|all] [--pattern
    'resnet*'] [--giants]

Weights are random, inputs the smallest that each model takes. A cell is `ok` where the attribution
is finite, has its shape, and is not zero while the gradient isn't; `warned` where the package
itself said that there is nothing to see, and why. After all methods, the model and the caller must
be as they were. Whatever else happens is a failure.
"""

from __future__ import annotations

import argparse
import fnmatch
import gc
import importlib
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from explain import Attribution, ExplainWarning, attribute
from explain.methods import GradCAM, IntegratedGradients, Method
from explain.methods.base import get_method, uses_layer

METHODS = [
    *map(get_method, ["gradcam", "layercam", "saliency", "guidedbackprop"]),
    IntegratedGradients(steps=3),
]
SIDES = (32, 48, 64, 80, 96, 128, 160, 192, 224, 240, 256, 384)
CLASSES = 10


@dataclass(frozen=True)
class Subject:
    """A model by name, how it is built, and the sides of the inputs to try, the smallest first."""

    name: str
    build: Callable[[], nn.Module]
    sides: Sequence[int] = SIDES
    giant: bool = False
    frames: int = 0
    """Of a video; 0 of a photo."""

    def inputs(self, count: int, side: int) -> torch.Tensor:
        return torch.randn(count, 3, *([self.frames] if self.frames else []), side, side)


@dataclass
class Row:
    """What came of one model: the layer found, its grid, a verdict for each method, and what was
    left behind."""

    name: str
    side: int = 0
    layer: str = "-"
    grid: str = "-"
    cells: dict[str, str] = field(default_factory=dict)
    left_behind: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failures(self) -> list[str]:
        wrong = [
            f"{method}: {cell}"
            for method, cell in self.cells.items()
            if cell not in ("ok", "warned")
        ]
        return wrong + [f"left behind: {what}" for what in self.left_behind]

    def __str__(self) -> str:
        cells = "".join(
            f"{cell if cell in ('ok', 'warned') else 'failed':>8}" for cell in self.cells.values()
        )
        return (
            f"{self.name:<34} {self.side:>4} {self.layer[-38:]:<38} {self.grid:>7}{cells} "
            f"{self.seconds:>6.1f}"
        )


def lively(model: nn.Module, x: torch.Tensor, seed: int = 0) -> nn.Module:
    """Switch on what initialisation switches off, and give batch normalisations the statistics of
    ``x``.

    Gates, scales and heads that begin at a constant would hide most of a network from its gradient.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.min() != parameter.max():
                continue
            if name.endswith("bias"):
                parameter.uniform_(-0.1, 0.1, generator=generator)
            elif parameter.squeeze().ndim > 1:
                parameter.normal_(0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        model.eval()
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.reset_running_stats()
                module.momentum = None
                module.train()
        model(x)
    return model.eval()


def state(model: nn.Module) -> dict[str, Any]:
    """Return all that an explanation must leave as it is."""

    def checksum(tensor: torch.Tensor | None) -> int | None:
        return None if tensor is None else zlib.crc32(tensor.detach().contiguous().view(-1).numpy())

    modules = list(model.modules())
    hooks = [
        len(value)
        for module in modules
        for key, value in vars(module).items()
        if "hooks" in key and value
    ]
    return {
        "weights": [checksum(tensor) for tensor in [*model.parameters(), *model.buffers()]],
        "gradients": [checksum(parameter.grad) for parameter in model.parameters()],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "training flags": [module.training for module in modules],
        "hooks": hooks,
        "attributes": [sorted(vars(module)) for module in modules],
        "random numbers": checksum(torch.get_rng_state()),
        "gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    }


def smallest(subject: Subject) -> tuple[nn.Module, int]:
    """Build a model, and find the smallest side of an input that it takes."""
    model = subject.build().eval()
    for side in subject.sides:
        try:
            with torch.no_grad():
                model(subject.inputs(2, side))
        except (RuntimeError, ValueError, AssertionError, IndexError):
            if side == subject.sides[-1]:
                raise
        else:
            return model, side
    raise ValueError(f"{subject.name} has no sides to try")


def examine(
    name: str, model: nn.Module, x: torch.Tensor, methods: Iterable[Method] = METHODS
) -> Row:
    """Explain a model with several methods, and look at what came of it and at what it left
    behind."""
    row = Row(name, x.shape[-1])
    before = state(model)
    start = time.perf_counter()
    methods = list(methods)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found: dict[str, Any] = dict(attribute(model, x, methods))
        except Exception:  # whatever it was: each method alone says which of them it came from
            found = {method.name: _alone(model, x, method) for method in methods}
    said = [str(w.message) for w in caught if issubclass(w.category, ExplainWarning)]
    for method in methods:
        attribution = found[method.name]
        told = any(message.startswith(f"{method.name} ") for message in said)
        row.cells[method.name] = _verdict(attribution, x, told, partial(_speaks_against, model, x))
        if uses_layer(method) and isinstance(attribution, Attribution):
            row.layer, row.grid = (
                str(attribution.layer),
                "x".join(map(str, attribution.values.shape[1:])),
            )
    after = state(model)
    row.left_behind = [what for what, value in before.items() if after[what] != value]
    row.seconds = time.perf_counter() - start
    return row


def _alone(model: nn.Module, x: torch.Tensor, method: Method) -> Attribution | Exception:
    try:
        return attribute(model, x, method)
    except Exception as error:
        return error


def _verdict(
    found: Attribution | Exception, x: torch.Tensor, told: bool, against: Callable[[str], bool]
) -> str:
    if isinstance(found, Exception):
        return f"{type(found).__name__}: {(str(found).splitlines() or [''])[0]}"
    values = found.values
    heatmap = found.heatmap
    layered = found.layer is not None
    expected = (
        values.ndim == x.ndim - 1 and values.shape[1:].numel() > 1
        if layered
        else values.shape == x.shape
    )
    if not expected or len(values) != len(x) or heatmap.shape != (len(x), *x.shape[2:]):
        return f"shape {tuple(values.shape)}, heatmap {tuple(heatmap.shape)}"
    if not values.isfinite().all() or not heatmap.isfinite().all():
        return "not finite"
    empty = not values.flatten(1).any(1).all()
    if empty and not (told and layered and against(str(found.layer))):
        return "zero, though the gradient isn't" if told else "zero without a warning"
    return "warned" if told else "ok"


def _speaks_against(model: nn.Module, x: torch.Tensor, layer: str) -> bool:
    """Whether a class map is zero because all of it speaks against the class, and not for want of a
    gradient."""
    signed = attribute(model, x, GradCAM(relu=False), layer=layer).values
    return bool(signed.flatten(1).any(1).all())


def torchvision_subjects() -> Iterator[Subject]:
    models = importlib.import_module("torchvision.models")
    for name in models.list_models(module=models):
        options: dict[str, Any] = {"weights": None, "num_classes": CLASSES}
        sides: Sequence[int] = SIDES
        if name.startswith("vit_"):
            sides = [2 * int(name.rsplit("_", 1)[1])]
            options["image_size"] = sides[0]
        if name in ("googlenet", "inception_v3"):
            options["init_weights"] = False
        giants = ("vit_h_14", "vit_l_16", "vit_l_32", "regnet_y_128gf", "convnext_large")
        yield Subject(name, partial(models.get_model, name, **options), sides, name in giants)


def video_subjects() -> Iterator[Subject]:
    models = importlib.import_module("torchvision.models")
    for name in models.list_models(module=models.video):
        build = partial(models.get_model, name, weights=None, num_classes=CLASSES)
        tokens = name.startswith("mvit")  # published for one size of clips
        yield Subject(
            f"video:{name}",
            build,
            [224] if tokens else SIDES,
            tokens,
            16 if tokens or name == "s3d" else 8,
        )


TIMM = """
    beit_base_patch16_224 cait_xxs24_224 caformer_s18 coat_lite_tiny coatnet_nano_rw_224 convit_tiny convmixer_768_32
    convnext_atto convnextv2_atto crossvit_tiny_240 cspdarknet53 davit_tiny deit3_small_patch16_224
    deit_tiny_distilled_patch16_224 densenet121 dla34 dpn48b edgenext_xx_small efficientformer_l1 efficientformerv2_s0
    efficientnet_b0 efficientvit_b0 efficientvit_m0 ese_vovnet19b_dw eva02_tiny_patch14_224 fastvit_t8
    focalnet_tiny_srf gcvit_xxtiny ghostnet_050 gmlp_ti16_224 halonet26t hgnet_tiny hiera_tiny_224 hrnet_w18_small
    inception_next_atto lambda_resnet26t lcnet_050 levit_128s mambaout_femto maxvit_nano_rw_256 mixer_s32_224
    mobilenetv3_small_050 mobilenetv4_conv_small mobilenetv4_hybrid_medium mobileone_s0 mobilevit_xxs mobilevitv2_050
    mvitv2_tiny nest_tiny nextvit_small nf_regnet_b0 pit_ti_224 pit_ti_distilled_224 poolformer_s12 pvt_v2_b0
    regnety_002 repvgg_a0 repvit_m0_9 res2net50_14w_8s resmlp_12_224 resnest14d resnet18 resnetv2_50 rexnet_100
    selecsls42b sequencer2d_s seresnet18 shvit_s1 skresnet18 starnet_s1 swin_tiny_patch4_window7_224
    swinv2_cr_tiny_224 swinv2_tiny_window8_256 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m twins_pcpvt_small
    twins_svt_small vgg11 visformer_tiny vit_base_patch16_siglip_224 vit_base_r26_s32_224
    vit_medium_patch16_reg4_gap_256 vit_small_patch14_reg4_dinov2 vit_tiny_patch16_224 volo_d1_224 xception41
    xcit_nano_12_p16_224
"""


def timm_subjects() -> Iterator[Subject]:
    timm = importlib.import_module("timm")
    known = set(timm.list_models())
    for name in TIMM.split():
        if name not in known:
            continue
        options: dict[str, Any] = {"num_classes": CLASSES}
        config = timm.get_pretrained_cfg(name)
        sides: Sequence[int] = SIDES
        if config.fixed_input_size:
            sides = [config.input_size[-1]]
            # published for 518 pixels; takes any multiple of its patches
            if name.startswith("vit_small_patch14"):
                sides = [56]
                options["img_size"] = 56
        yield Subject(f"timm:{name}", partial(timm.create_model, name, **options), sides)


def transformers_subjects() -> Iterator[Subject]:
    """Hugging Face's classifiers, tiny."""
    library = importlib.import_module("transformers")
    common = {"num_labels": CLASSES, "image_size": 32}
    tokens = {
        **common,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "intermediate_size": 64,
    }
    tokens["patch_size"] = 8
    windows = {
        **common,
        "patch_size": 2,
        "embed_dim": 16,
        "depths": [1, 2],
        "num_heads": [2, 2],
        "window_size": 4,
    }
    stages = {"num_labels": CLASSES, "hidden_sizes": [16, 24, 32], "depths": [1, 1, 1]}
    configurations: dict[str, dict[str, Any]] = {
        "ViT": tokens,
        "DeiT": tokens,
        "Beit": tokens,
        "Dinov2": tokens,
        "Dinov2WithRegisters": tokens,
        "Swin": windows,
        "Swinv2": windows,
        "ConvNext": {**stages, "num_stages": 3},
        "ConvNextV2": {**stages, "num_stages": 3},
        "ResNet": {**stages, "embedding_size": 16, "layer_type": "basic"},
        "RegNet": {**stages, "embedding_size": 16, "groups_width": 8},
        "PoolFormer": {"num_labels": CLASSES},
        "MobileViT": {**common, "num_labels": CLASSES},
        "Pvt": {"num_labels": CLASSES, "image_size": 64},
        "Segformer": {"num_labels": CLASSES},
        "Levit": {"num_labels": CLASSES, "image_size": 224},
        "FocalNet": {
            **common,
            "embed_dim": 16,
            "depths": [1, 1],
            "focal_levels": [2, 2],
            "focal_windows": [3, 3],
        },
        "Cvt": {"num_labels": CLASSES},
    }
    for name, options in configurations.items():
        if not hasattr(library, f"{name}ForImageClassification"):
            continue

        def build(name: str = name, options: dict[str, Any] = options) -> nn.Module:
            config = getattr(library, f"{name}Config")(**options)
            model: nn.Module = getattr(library, f"{name}ForImageClassification")(config)
            return model

        yield Subject(
            f"transformers:{name}",
            build,
            [options["image_size"]] if "image_size" in options else SIDES,
        )


SOURCES = {
    "torchvision": torchvision_subjects,
    "video": video_subjects,
    "timm": timm_subjects,
    "transformers": transformers_subjects,
}


def check(subject: Subject, methods: Iterable[Method] = METHODS) -> Row:
    """Build a model, bring it to life, and explain two random images with it."""
    torch.manual_seed(0)
    try:
        model, side = smallest(subject)
        lively(model, subject.inputs(4, side))
    except Exception as error:  # whatever it is, it belongs into the table
        return Row(subject.name, cells={"build": f"{type(error).__name__}: {error}"})
    return examine(subject.name, model, subject.inputs(2, side), methods)


def subjects(description: str, arguments: Sequence[str] | None = None) -> Iterator[Subject]:
    """The models that a command line asks for; it sets the number of threads, too."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--source", choices=[*SOURCES, "all"], default="torchvision")
    parser.add_argument("--pattern", default="*", help="which models, as in 'resnet*'")
    parser.add_argument(
        "--giants", action="store_true", help="those with hundreds of millions of weights, too"
    )
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    found = (
        subject
        for name in (SOURCES if options.source == "all" else [options.source])
        for subject in SOURCES[name]()
    )
    return (
        subject
        for subject in found
        if fnmatch.fnmatch(subject.name.split(":")[-1], options.pattern)
        and (options.giants or not subject.giant)
    )


def main() -> int:
    wanted = subjects((__doc__ or "").splitlines()[0])
    rows: list[Row] = []
    print(
        f"{'model':<34} {'side':>4} {'layer':<38} {'grid':>7}",
        *(f"{m.name[:7]:>7}" for m in METHODS),
        "seconds",
    )
    for subject in wanted:
        rows.append(check(subject))
        print(rows[-1], flush=True)
        gc.collect()
    failed = [row for row in rows if row.failures]
    for row in failed:
        print(f"\n{row.name}", *row.failures, sep="\n    ")
    cells = [cell for row in rows for cell in row.cells.values()]
    print(
        f"\n{len(rows)} models, {len(cells)} cells: {cells.count('ok')} ok, "
        f"{cells.count('warned')} warned, "
        f"{len(failed)} models with failures, {sum(row.seconds for row in rows):.0f} s"
    )
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
