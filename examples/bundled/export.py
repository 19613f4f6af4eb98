"""Turn a checkpoint of `train.py` into the file that is shipped: half precision, labels,
preprocessing, temperature.

python examples/bundled/export.py path/to/tiny-imagenet-200 checkpoint.pt explain/models/bundled.pt
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from data import classes, validation_files, words
from measures import fit_temperature, logits_of
from train import MEAN, STD

from explain.models import CenterCrop, Classifier
from explain.models.small_networks import SmallResNet

ARCHITECTURE = {"classes": 200, "stem": 32, "widths": (128, 256, 512), "depths": (2, 3, 4)}
SIDE = 80
CROP = 1.0

# Where the dictionary's first word is not what somebody would call the thing, or says too little.
PLAIN_NAMES = {
    "n02123045": "tabby cat",
    "n02814533": "station wagon",
    "n02814860": "lighthouse",
    "n02509815": "red panda",
    "n02892201": "memorial plaque",
    "n03126707": "crane (machine)",
    "n03250847": "drumstick (of a drum)",
    "n03854065": "pipe organ",
    "n03902125": "pay phone",
    "n03983396": "soda bottle",
    "n04008634": "missile",
    "n04067472": "fishing reel",
    "n04399382": "teddy bear",
    "n04532106": "priest's vestment",
    "n03014705": "chest (box)",
    "n03599486": "rickshaw",
    "n07579787": "plate of food",
    "n07615774": "ice lolly",
    "n07747607": "orange (fruit)",
    "n09193705": "mountain (alp)",
    "n02788148": "banister",
    "n04371430": "swimming trunks",
    "n03637318": "lampshade",
    "n02190166": "fly (insect)",
    "n02999410": "metal chain",
    "n04456115": "torch (flaming)",
}


def labels(folder: Path) -> list[str]:
    """Return readable, distinct English labels for the classes."""
    known = words(folder)
    found = [PLAIN_NAMES.get(wnid, known[wnid].split(",")[0].strip()) for wnid in classes(folder)]
    assert len({label.casefold() for label in found}) == len(found), "labels must be distinct"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    options = parser.parse_args()
    trained = torch.load(options.checkpoint, weights_only=True, map_location="cpu")["model"]
    state = {name: t.half() if t.is_floating_point() else t for name, t in trained.items()}
    model = SmallResNet(**ARCHITECTURE)
    model.load_state_dict(
        {name: t.float() if t.is_floating_point() else t for name, t in state.items()}
    )
    classifier = Classifier(model.eval(), CenterCrop(SIDE, CROP, MEAN, STD), labels(options.folder))
    files = validation_files(options.folder)[::2]
    logits = logits_of(classifier, [path for path, _ in files])
    temperature = fit_temperature(logits, torch.tensor([label for _, label in files]))
    content = {
        "architecture": ARCHITECTURE,
        "state_dict": {name: tensor.contiguous() for name, tensor in state.items()},
        "categories": classifier.categories,
        "preprocess": {"side": SIDE, "crop": CROP, "mean": MEAN, "std": STD},
        "temperature": temperature,
    }
    torch.save(content, options.output)
    print(
        f"{options.output}: {options.output.stat().st_size / 1e6:.2f} MB, temperature "
        f"{temperature:.3f}"
    )


if __name__ == "__main__":
    main()
