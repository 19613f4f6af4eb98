"""`--skip-existing` skips photos whose results are there: of the same pixels, the same question and
the same model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import nn

from explain.cli import main
from tests.conftest import ROOT
from tests.runs.networks import picture


@pytest.fixture(autouse=True)
def _explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(0, (64, 48)).save("a.bmp")
    assert main([*question(), "--method=saliency"]) == 0
    capsys.readouterr()


def test_the_same_is_skipped_and_so_is_a_part_of_it_wherever_the_photo_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert is_skipped(capsys, *question(), "--method=saliency")
    assert is_skipped(capsys, *question())
    Path("other").mkdir()
    Path("a.bmp").rename("other/a.bmp")
    assert is_skipped(capsys, "other/a.bmp", *question()[1:])


def test_a_photo_of_the_same_bytes_in_other_rows_is_not_skipped(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Image.new("RGB", (64, 48), "teal").save("a.bmp")
    assert main([*question(), "--force"]) == 0
    assert is_skipped(capsys, *question())
    Image.new("RGB", (48, 64), "teal").save("a.bmp")
    assert not is_skipped(capsys, *question())


@pytest.mark.parametrize("ending", ["sheet.png", "saliency.npy"])
def test_results_of_which_a_file_is_gone_are_not_skipped(
    ending: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (path,) = Path("explained").glob(f"*{ending}")
    path.unlink()
    assert not is_skipped(capsys, *question(), "--method=saliency")


def test_only_files_that_it_wrote_are_opened(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others begin with the photo's name, too; a picture or values that are missing decide
    first."""
    names = ("a-notes.json", "a-annotations-gradcam.json", "a-2-gradcam.json", "b-gradcam.json")
    for name in names:
        Path("explained", name).write_text("[" * 50)
    Path("explained", "a-2-gradcam.npy").write_text("no array")
    opened = []
    read = Path.open

    def noted(path: Path, *args: Any, **options: Any) -> Any:
        opened.append(path.name)
        return read(path, *args, **options)

    monkeypatch.setattr(Path, "open", noted)
    assert is_skipped(capsys, *question())
    ours = [name for name in opened if name.startswith(("a-", "b-"))]
    assert sorted(ours) == ["a-tiny-rocking-chair-gradcam.json", "a-tiny-rocking-chair-gradcam.npy"]


def is_skipped(capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    code = main([*words, "--skip-existing"])
    out, err = capsys.readouterr()
    assert code == int("exists already" in err)
    return "skipped" in out


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("target", "4"),
        ("model", "tiny-transformer"),
        ("crop", "whole"),
        ("method", "gradcam(relu=False)"),
        ("ablate", "layer3[1]"),
        ("layer", "layer2"),
    ],
)
def test_another_question_or_model_is_not_skipped(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_skipped(capsys, *question(**{option: value}))


def test_another_model_of_the_same_name_is_not_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    torch.save(network, "trained.pt")
    Path("own.py").write_text(
        "import torch\ndef make():\n    return torch.load('trained.pt', weights_only=False)\n"
    )
    words = ["a.bmp", "--model", "./own.py:make", "--size", "16", "--target", "3"]
    assert main(words) == 0
    assert is_skipped(capsys, *words)
    network[0].bias.data += 1
    torch.save(network, "trained.pt")
    assert not is_skipped(capsys, *words)


def test_a_box_that_is_found_again_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    photo = str(ROOT / "assets" / "grace_hopper.jpg")
    words = [photo, "--model", "nanodet", "--method", "saliency", "--target", "tie"]
    assert main(words) == 0
    assert is_skipped(capsys, *words)


def question(**changes: str) -> list[str]:
    options = {"model": "tiny", "method": "gradcam", "target": "3", **changes}
    return ["a.bmp", *(f"--{name}={value}" for name, value in options.items())]
