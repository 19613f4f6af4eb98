"""Models of others: the user's own, those in files, and classifiers of torchvision and timm.

A model of the user is a module or ``package.module:factory``; its preprocessing and labels are known or assumed. A file
has TorchScript, an exported program or ONNX, of which the scores alone are known. Classifiers by name have their own
published weights, transforms and labels. Weights in files are tensors only, never code.
"""

import hashlib
import importlib
import importlib.util
import os
import pickle
import re
import sys
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import safetensors.torch
import torch
from torch import nn
from torch.export import ExportedProgram

from explain._utils.errors import ModelError, did_you_mean, either, muted, option, optional, quiet, warn
from explain._utils.signals import temporarily
from explain.data.images import Preprocess
from explain.hooks.unwrap import unwrapped
from explain.models import huggingface
from explain.models.bundled import NAME, NANODET, PERSON_SEGMENTER, TINY, TINY_CLIP, TRANSFORMER
from explain.models.classifier import Classifier
from explain.models.preprocessing import CenterCrop, CropLike, Interpolation, Values, adjusted, center_of, cropped
from explain.targets.outputs import configured

SUFFIXES = (".ts", ".torchscript", ".pt", ".pth", ".pt2", ".onnx")
"""The ends of the names of files that `load_file` reads."""
Scores = Callable[[torch.Tensor], Any]


class BlackBox(nn.Module):
    """A network of which nothing but its output is known; layers and operations are not there to be explained.

    ``shape`` is that of the input that it was made for, with None where any length is taken. A batch that it was not
    made for is given to it in parts.

    >>> network = BlackBox(lambda x: x.mean((2, 3)), (1, 3, 8, 8))
    >>> network(torch.rand(5, 3, 8, 8)).shape
    torch.Size([5, 3])
    """

    hidden_layers = True

    def __init__(self, scores: Scores, shape: tuple[int | None, ...] = (None, None, None, None)) -> None:
        super().__init__()
        self.scores, self.shape = scores, shape

    def forward(self, x: torch.Tensor) -> Any:
        rows = self.shape[0]
        if rows in (None, len(x)):
            return self.scores(x)
        filled = torch.cat([x, x[-1:].expand(-len(x) % rows, *x.shape[1:])])
        return torch.cat([self.scores(part) for part in torch.split(filled, rows)])[: len(x)]


def as_module(model: Any) -> Any:
    """Return a scripted module or an exported program as a module of Python code; anything else as it is."""
    if isinstance(model, torch.jit.ScriptModule):
        return nn.Sequential(model)
    if isinstance(model, ExportedProgram):
        given = next(node for node in model.graph.nodes if node.name in model.graph_signature.user_inputs)
        shape = tuple(side if isinstance(side, int) else None for side in given.meta["val"].shape)
        return BlackBox(model.module(), shape)
    return model


def load_file(path: Path) -> nn.Module:
    """Read a TorchScript file, an exported program (.pt2) or an ONNX model (.onnx).

    Raises:
        ModelError: there is no such file, it is of another kind, or onnxruntime is not installed.
    """
    if not path.is_file():
        raise ModelError(f"model {str(path)!r} must be a file, but there is none; check the path")
    suffix = path.suffix.lower()
    try:
        with quiet():
            if suffix == ".onnx":
                return _onnx(path)
            return as_module(torch.export.load(path) if suffix == ".pt2" else torch.jit.load(path))  # type: ignore[no-untyped-call]
    except ModelError:
        raise
    except Exception as error:  # a damaged file may break the reader anywhere
        kind = {".onnx": "an ONNX model", ".pt2": "an exported program"}.get(suffix, "a TorchScript file")
        reason = " ".join(str(error).split())[:100]
        told = f"must be {kind}, but cannot be read ({reason}); a state dict is given as weights of a model"
        raise ModelError(f"model {str(path)!r} {told}") from None


def _onnx(path: Path) -> BlackBox:
    runtime = optional("onnxruntime", f"for the model {str(path)!r}", "onnx", ModelError)
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    given = session.get_inputs()[0]

    def scores(x: torch.Tensor) -> torch.Tensor:
        (found, *_) = session.run(None, {given.name: x.detach().cpu().numpy()})
        return torch.from_numpy(found).to(x.device)

    return BlackBox(scores, tuple(side if isinstance(side, int) else None for side in given.shape))


DEFAULT = NAME
TIMM = "timm:"


def is_file_or_code(name: str) -> bool:
    """Whether loading a model of this name runs a file, or a function that the name says.

    >>> [is_file_or_code(name) for name in ("tiny", "timm:resnet18.a1_in1k", "./x.pt2", "a.b:make", "timm:hf-hub:a/b")]
    [False, False, True, True, True]
    """
    return ":" in name.removeprefix(TIMM) or Path(name).suffix.lower() in SUFFIXES


UNUSABLE = (ImportError, RuntimeError, OSError, AttributeError)  # what a package raises that fits no other's release


def torchvision_models() -> ModuleType:
    """Import ``torchvision.models``.

    Raises:
        ModelError: it is missing, or its compiled part was built for another torch.
    """
    try:
        return importlib.import_module("torchvision.models")
    except UNUSABLE as error:
        raise _no_torchvision(error) from None


def _no_torchvision(error: Exception) -> ModelError:
    """Return the error that says why torchvision cannot be used."""
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    remedy = "run 'pip install --upgrade torch torchvision', or use a model that comes along or your own"
    return ModelError(f"torchvision cannot be used with torch {torch.__version__} ({reason}); {remedy}")


def list_models() -> list[str]:
    """Return the names that `load` takes: the models of this package, the default first, then torchvision's."""
    models = torchvision_models()
    return [DEFAULT, TINY, TRANSFORMER, TINY_CLIP, NANODET, PERSON_SEGMENTER, *models.list_models(module=models)]


def load_torchvision(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load a torchvision classifier with its published weights, or with those in a file of yours.

    Raises:
        ModelError: unknown name, or weights that are not here and cannot be downloaded.
    """
    models = torchvision_models()
    known = list_models()
    if name not in known:
        hint = f"name its function: {name}:make" if name.endswith(".py") else did_you_mean(name, known)
        raise ModelError(f"model {name!r} is unknown (your own is given as package.module:factory); {hint}")
    published = models.get_model_weights(name).DEFAULT
    preprocess, categories = published.transforms(), published.meta["categories"]
    if size is not None:
        preprocess = replace(center_of(preprocess, option("size")), side=size)
    if weights is None:
        try:  # as torchvision does: some builders set more than parameters by their published weights
            model = models.get_model(name, weights=published)
        except (OSError, RuntimeError) as error:
            cached = Path(torch.hub.get_dir()) / "checkpoints" / published.url.rsplit("/", 1)[1]
            raise _not_downloaded(name, f" at {str(cached)!r}", error) from None
        return Classifier(model.eval(), preprocess, categories, name, 1.0, str(published))
    old = r"(.*denselayer\d+\.(?:norm|relu|conv))\.([12]\..*)"  # names of published DenseNets
    state = {re.sub(old, r"\1\2", key): tensor for key, tensor in read_weights(weights).items()}
    # These two rescale the input when they carry published weights; weights tuned from those expect the same.
    extra = {"init_weights": False, "transform_input": True} if name in ("googlenet", "inception_v3") else {}
    classes = _count_classes(models, name, extra, state) or len(categories)
    model = models.get_model(name, weights=None, num_classes=classes, **extra)
    fit_weights(model, state, weights)
    same = categories if len(categories) == classes else None
    return Classifier(model.eval(), preprocess, same, name, 1.0, describe_weights(weights))


def _not_downloaded(name: str, where: str, error: Exception) -> ModelError:
    reason = " ".join(str(getattr(error, "reason", error)).split())[:100].strip()
    remedy = "go online once, copy the file there, give your own with --weights, or use the model 'tiny'"
    return ModelError(f"model {name!r} needs its weights{where}, which could not be downloaded ({reason}); {remedy}")


def _count_classes(models: ModuleType, name: str, extra: dict[str, bool], state: dict[str, torch.Tensor]) -> int | None:
    """Return how many classes a state dict has, read from the tensors that the number of classes changes; or None."""
    marker = 9_973  # no torchvision model has a layer of this width by itself
    try:
        with torch.device("meta"):  # without memory or initial values
            model = models.get_model(name, weights=None, num_classes=marker, **extra)
    except NotImplementedError:  # some builders compute with tensors
        model = models.get_model(name, weights=None, num_classes=marker, **extra)
    heads = [key for key, tensor in model.state_dict().items() if tensor.ndim and len(tensor) == marker]
    return next((len(state[key]) for key in reversed(heads) if key in state and state[key].ndim), None)


def load_timm(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Load one of timm's classifiers, named like ``timm:convnext_tiny``, with its published weights or those in a file.

    Raises:
        ModelError: timm is not installed, the name is unknown, or the weights cannot be downloaded.
    """
    try:
        timm = importlib.import_module("timm")
    except UNUSABLE as error:
        if "torchvision" in str(error):  # which timm imports
            raise _no_torchvision(error) from None
        told = f"which cannot be imported ({error}); run pip install 'explain-hooks[timm]'"
        raise ModelError(f"model {name!r} needs timm, {told}") from None
    plain = name.removeprefix(TIMM)
    if not timm.is_model(plain):
        raise ModelError(f"model {name!r} is unknown to timm; {did_you_mean(plain, timm.list_models())}")
    state = None if weights is None else read_weights(weights)
    options: dict[str, Any] = {}
    published = timm.get_pretrained_cfg(plain)
    if state is not None:
        heads = [published.classifier] if isinstance(published.classifier, str) else published.classifier or ()
        tensors = [state.get(f"{head}.{kind}") for head in heads for kind in ("weight", "bias")]
        classes = (len(tensor) for tensor in tensors if tensor is not None and tensor.ndim)
        options["num_classes"] = next(classes, published.num_classes)
    if size is not None and published.fixed_input_size:
        options["img_size"] = size
    try:
        with nullcontext() if state is not None else _hub_or_cache():
            model: nn.Module = timm.create_model(plain, pretrained=state is None, **options)
    except (OSError, RuntimeError) as error:
        raise _not_downloaded(name, "", error) from None
    if state is not None and weights is not None:
        fit_weights(model, state, weights)
    preprocess, labels = timm_transform_and_labels(timm, model, size)
    origin = str(published.tag and f"{plain}.{published.tag}") if weights is None else describe_weights(weights)
    return Classifier(model.eval(), preprocess, labels, name, 1.0, origin)


@contextmanager
def _hub_or_cache() -> Iterator[None]:
    """Let the Hugging Face hub use its cache alone if it cannot be reached: it would try for half a minute a file."""
    try:
        hub = importlib.import_module("huggingface_hub")
        constants, session = hub.constants, hub.utils.get_session()
    except (ImportError, AttributeError):  # of other releases
        yield
        return
    online = not constants.HF_HUB_OFFLINE
    with temporarily(constants, HF_HUB_OFFLINE=True):
        with suppress(Exception):  # of requests or httpx, as the release has it
            if online:
                session.head(constants.ENDPOINT, timeout=5)
                constants.HF_HUB_OFFLINE = False
        yield


def timm_config(model: nn.Module) -> Mapping[str, Any] | None:
    """Return the configuration that comes with a model of timm, or None.

    Models of transformers that wrap one of timm have it inside their own configuration.
    """
    for holder in (model, getattr(model, "config", None)):
        config = None if isinstance(holder, Mapping) else getattr(holder, "pretrained_cfg", None)
        if isinstance(config, Mapping) and "mean" in config and "input_size" in config:
            return config
    return None


def timm_transform_and_labels(
    timm: ModuleType, model: nn.Module, size: int | None = None
) -> tuple[Preprocess, Sequence[str] | None]:
    """Return the preprocessing and the labels that a model's configuration names, as timm itself makes them."""
    given: dict[str, Any] = {} if size is None else {"input_size": (3, size, size)}
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None)  # where the caller chose another size
    if size is None and isinstance(built_for, Sequence) and len(built_for) == 2:
        given["input_size"] = (3, *built_for)
    found = timm_config(model)
    config = timm.data.resolve_data_config(given, pretrained_cfg=None if found is None else dict(found), model=model)
    return timm.data.create_transform(**config), _labels(timm, model, found or {})


def _labels(timm: ModuleType, model: nn.Module, config: Mapping[str, Any]) -> list[str] | None:
    """The labels in the configuration, or those of ImageNet where the model has as many classes as one of its sets."""
    classes = getattr(model, "num_classes", None)
    names, descriptions = config.get("label_names"), config.get("label_descriptions") or {}
    if names is not None and len(names) == classes:
        return [str(descriptions.get(name, name)) for name in names]
    subset = timm.data.infer_imagenet_subset({"num_classes": classes})
    if subset is None:
        return None
    info = timm.data.ImageNetInfo(subset)
    return [info.index_to_description(i) for i in range(info.num_classes())]


def as_classifier(model: nn.Module, *, name: str | None = None, size: int | None = None) -> Classifier:
    """Wrap a bare module, with the preprocessing and the labels that come with it.

    It looks for these, in this order: its attributes ``preprocess`` and ``categories``; for a model of timm, its
    ``pretrained_cfg``; for a model of transformers, its image processor (an attribute ``image_processor``, or the file
    beside the weights) and the ``id2label`` of its configuration. Nothing is downloaded. What is not known is assumed,
    and ``Classifier.assumed`` says so.

    Raises:
        ModelError: ``size`` is given, and the preprocessing has a fixed one.

    >>> as_classifier(nn.Conv2d(3, 5, 1), size=32).assumed.split("; ")[1]
    "assumed: a centre crop of 32 pixels, ImageNet's mean and standard deviation"
    """
    inner = inside(model)
    name = name or type(inner).__name__
    preprocess, labels = (_own(model, inner, attribute) for attribute in ("preprocess", "categories"))
    preprocess = preprocess if callable(preprocess) else None
    if preprocess is not None and size is not None:
        raise _fixed_size(name)
    known = True  # whether anything says what the preprocessing is
    config, of_timm = huggingface.config_of(inner), timm_config(inner)
    if config is not None:
        labels = huggingface.labels(config) if labels is None else labels
        if preprocess is None and of_timm is None:
            preprocess, known = huggingface.preprocessing(inner, config, size)
    if of_timm is not None:
        with suppress(Exception):  # the configuration alone does not make a model one of timm
            transform, named = timm_transform_and_labels(importlib.import_module("timm"), inner, size)
            preprocess, labels = preprocess or transform, labels or named
    if preprocess is None:
        kinds = (nn.Conv2d, nn.Conv3d)
        channels = next((module.in_channels for module in inner.modules() if isinstance(module, kinds)), None)
        shape = inner.shape if isinstance(inner, BlackBox) else (None, channels, None, None)
        preprocess = adjusted(CenterCrop(size or shape[2] or 224), channels=1 if shape[1] == 1 else None)
        known = False
    assumed = None if known else _what_is_assumed(name, preprocess)
    return Classifier(model, preprocess, labels, name, assumed=assumed, activation=configured(inner))


def _own(model: nn.Module, inner: nn.Module, name: str) -> Any:
    """Return an attribute of a model, or of the one that it is wrapped around."""
    own = getattr(model, name, None)
    return getattr(inner, name, None) if own is None else own


def _fixed_size(name: str) -> ModelError:
    told = "cannot be changed for a model that brings its own preprocessing"
    return ModelError(f"{option('size')} {told}, got {name!r}; leave it out")


def inside(model: nn.Module) -> nn.Module:
    """Return the module inside of DataParallel and the like, or the given one; scripted ones are refused elsewhere."""
    with muted(), suppress(ModelError):
        return unwrapped(model)
    return model


def as_preprocess(given: Any) -> Preprocess:
    """Return what was given for a preprocessing as a function of a photo; image processors of transformers are known.

    Raises:
        ModelError: it cannot be called.
    """
    if (processed := huggingface.as_processed(given)) is not None:
        return processed
    if not callable(given):
        got = type(given).__name__
        raise ModelError(f"preprocess must be a function of a PIL image, got {got}; use a transform or a lambda")
    return cast("Preprocess", given)


def load_custom(name: str, weights: str | Path | None = None, size: int | None = None) -> Classifier:
    """Import ``module`` (the current folder counts) or a file, call its factory, and load weights into the model.

    The factory returns an ``nn.Module``, or a `Classifier` that brings preprocessing and labels along. What a module
    says about them itself is taken; see `as_classifier`.

    Raises:
        ModelError: there is no such module or factory, or it does not give a model. What the factory itself raises
            comes through.
    """
    where, _, attribute = name.rpartition(":")
    if not where or not attribute:
        raise ModelError(f"model must be given as package.module:factory or ./file.py:factory, got {name!r}")
    is_file = where.endswith(".py")
    folder = Path(where).resolve().parent if is_file else Path.cwd()
    if is_file and not Path(where).is_file():
        raise ModelError(f"model {name!r} must name a file, but there is no {where!r}; check the path")
    if str(folder) not in sys.path and (is_file or "" not in sys.path):
        sys.path.insert(0, str(folder))
    try:
        module = _module_of_file(Path(where).resolve()) if is_file else importlib.import_module(where)
    except ModuleNotFoundError as error:
        if error.name is None or not (where == error.name or where.startswith(error.name + ".")):
            raise  # the user's module exists, and misses an import of its own
        raise ModelError(f"model {name!r}: no module named {error.name!r}; run from its folder or install it") from None
    if not hasattr(module, attribute):
        known = [key for key, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__]
        raise ModelError(f"model {name!r}: {where} has no {attribute!r}; {did_you_mean(attribute, known)}")
    found = getattr(module, attribute)
    if callable(found) and not isinstance(found, (nn.Module, Classifier)):
        found = found()
    if isinstance(found, nn.Module):
        found = as_classifier(found, name=name, size=size)
    elif size is not None and isinstance(found, Classifier):
        raise _fixed_size(name)
    if not isinstance(found, Classifier):
        raise ModelError(f"model {name!r} must be or return an nn.Module, got {type(found).__name__}")
    return found if weights is None else with_weights(found, weights)


def _module_of_file(path: Path) -> ModuleType:
    """Import a file, under a name of its own: another module may have the same file name."""
    name = f"{path.stem}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name not in sys.modules:
        spec: Any = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def with_weights(classifier: Classifier, path: str | Path) -> Classifier:
    """Load a state dict into a classifier's model, and say so in the classifier."""
    fit_weights(classifier.model, read_weights(path), path)
    return replace(classifier, weights=describe_weights(path))


def resolve_preprocessing(
    found: Classifier, own: Preprocess | None = None, *, size: int | None = None, crop: CropLike = "center",
    channels: int | None = None, mean: Values = None, std: Values = None, interpolation: Interpolation | None = None,
) -> Preprocess:  # fmt: skip
    """Return how a classifier's photos become its inputs, with the caller's ``own`` preprocessing or values.

    What is assumed, since neither the model nor the caller says it, is warned of.

    Raises:
        ModelError: the preprocessing is one that cannot be changed in this way.
    """
    preprocess = found.preprocess if own is None else own
    assumed = found.assumed if own is None else None
    side = found.model.shape[2] if isinstance(found.model, BlackBox) else None
    known = [name for name, value in (("size", size or side), ("mean", mean), ("std", std)) if value is not None]
    if isinstance(preprocess, huggingface.Processed):
        preprocess, mean, std = preprocess.with_values(mean, std), None, None
    preprocess = adjusted(preprocess, channels=channels, mean=mean, std=std, interpolation=interpolation)
    if assumed is not None and (told := _what_is_assumed(found.name, preprocess, known)) is not None:
        warn(told)
    return cropped(preprocess, crop, found.model)


def _what_is_assumed(name: str, preprocess: Preprocess, known: Collection[str] = ()) -> str | None:
    """Say what is assumed of the preprocessing of a model that says nothing, but for what is ``known``.

    >>> _what_is_assumed("Net", CenterCrop(32), {"mean"}).split("; ")[1]
    "assumed: a centre crop of 32 pixels, ImageNet's standard deviation"
    >>> _what_is_assumed("Net", CenterCrop(32), {"size", "mean", "std"})
    """
    words = [word for each, word in (("mean", "mean"), ("std", "standard deviation")) if each not in known]
    if not words and "size" in known:
        return None
    if isinstance(preprocess, CenterCrop):
        assumed = f"a centre crop of {preprocess.side} pixels{' in grey' if len(preprocess.mean) == 1 else ''}"
        assumed += f", ImageNet's {' and '.join(words)}" if words else ""
    else:
        assumed = f"the usual image processor of its kind, {preprocess}"
    flags = ", ".join(f"--{each}" for each in ("size", "mean", "std") if each not in known)
    remedy = f"{either('pass preprocess=', f'give {flags}')}, or give the model an attribute preprocess"
    return f"preprocess is not known for model {name!r}; assumed: {assumed}; {remedy}"


def read_weights(path: str | Path) -> dict[str, torch.Tensor]:
    """Read a state dict that was saved with ``torch.save``, alone or under "state_dict", "model" or "model_state_dict",
    or a file of safetensors, which is known by its name.

    Raises:
        ModelError: missing, damaged, or a file that holds more than tensors and would have to run code to load.
    """
    path = Path(path)
    if not os.path.isfile(path):  # unlike Path.is_file, this takes any name for an answer
        raise ModelError(f"weights {str(path)!r} must be a file, but there is none; check the path")
    try:
        with quiet():  # of old formats: what cannot be read is refused below
            content: Any = _read(path)
    except pickle.UnpicklingError:
        told = "a PyTorch file with nothing but tensors, but is another or runs code; save model.state_dict()"
        raise ModelError(f"weights {str(path)!r} must be {told}") from None
    except Exception as error:  # a damaged file may break the reader anywhere
        told = " ".join(str(error).split())[:100]  # which may be no more than a number
        reason = told if re.search("[a-z]{3}", told) else "it is not a file of PyTorch"
        raise ModelError(f"weights {str(path)!r} cannot be read ({reason}); save them again") from None
    if isinstance(content, Mapping):
        inside = (content.get(key) for key in ("state_dict", "model_state_dict", "model"))
        content = next((each for each in inside if isinstance(each, Mapping)), content)
    is_state = isinstance(content, Mapping) and all(isinstance(value, torch.Tensor) for value in content.values())
    if not is_state or not content:
        raise ModelError(f"weights {str(path)!r} must hold a state dict of tensors; save model.state_dict()")
    return {str(name).removeprefix("module."): tensor for name, tensor in content.items()}


def _read(path: Path) -> Any:
    if path.suffix.lower() == ".safetensors":
        return safetensors.torch.load_file(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if sum(each.file_size for each in archive.infolist()) > path.stat().st_size:  # torch.save compresses none
                raise ValueError("it would become larger when it is unpacked")
    return torch.load(path, weights_only=True, map_location="cpu")


def fit_weights(model: nn.Module, state: Mapping[str, torch.Tensor], path: str | Path) -> None:
    """Load a state dict into a model of the same kind.

    Raises:
        ModelError: names or shapes differ; the message names the first that does.
    """
    own = model.state_dict()
    missing = [name for name in own if name not in state]
    extra = [name for name in state if name not in own]
    wrong = [name for name in own if name in state and own[name].shape != state[name].shape]
    if wrong:
        first = f"{wrong[0]} is {tuple(state[wrong[0]].shape)} instead of {tuple(own[wrong[0]].shape)}"
    elif missing:
        first = f"{missing[0]} is missing"
    elif extra:
        first = f"{extra[0]} is not in the model; {did_you_mean(extra[0], own)}"
    else:
        model.load_state_dict(state)
        return
    kinds = {"missing": missing, "unknown": extra, "of another shape": wrong}
    counts = ", ".join(f"{len(names)} {kind}" for kind, names in kinds.items() if names)
    told = f"of their tensors {counts} ({first}); take those of this very network"
    raise ModelError(f"weights {str(path)!r} must fit the model, but {told}")


def describe_weights(path: str | Path) -> str:
    """Return the name of a file of weights and its SHA-256, for a record."""
    with Path(path).open("rb") as file:
        return f"{path} (sha256 {hashlib.file_digest(file, 'sha256').hexdigest()})"
