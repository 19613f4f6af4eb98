"""`--skip-existing` skips photos whose results are there: of the same pixels, the same question and
the same model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from explain.cli import main
from tests.conftest import ROOT
from tests.runs.networks import picture

PLAIN = ["a.bmp", "--model", "tiny", "--method", "saliency", "--method", "gradcam", "--target", "3"]


@pytest.fixture(autouse=True)
def _explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    picture(0, (64, 48)).save("a.bmp")
    assert main(PLAIN) == 0
    capsys.readouterr()


def is_skipped(capsys: pytest.CaptureFixture[str], *words: str) -> bool:
    code = main([*words, "--skip-existing"])
    out, err = capsys.readouterr()
    assert ("exists already" in err) == (code == 1)
    return "skipped" in out


def changed(option: str, value: str) -> list[str]:
    words = [*PLAIN, option, value]
    if option in PLAIN:
        place = PLAIN.index(option)
        words = [*PLAIN[: place + 1], value, *PLAIN[place + 2 :]]
    return words


def test_the_same_is_skipped_and_so_is_a_part_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert is_skipped(capsys, *PLAIN)
    assert is_skipped(capsys, *PLAIN[:5], *PLAIN[7:])


def test_another_question_or_model_is_not_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    others = {
        "--target": "4",
        "--model": "tiny-transformer",
        "--layer": "layer2",
        "--crop": "whole",
        "--method": "saliency(absolute=False)",
        "--ablate": "layer3[1]",
    }
    for option, value in others.items():
        assert not is_skipped(capsys, *changed(option, value)), option
    assert is_skipped(capsys, *PLAIN)


def test_another_model_of_the_same_name_is_not_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)
    )
    torch.save(network, "trained.pt")
    Path("own.py").write_text(
        "import torch\ndef make():\n    return torch.load('trained.pt', weights_only=False)\n"
    )
    words = ["a.bmp", "--model", "./own.py:make", "--size", "16", "--target", "3"]
    assert main(words) == 0
    assert is_skipped(capsys, *words)
    network[3].bias.data += 1
    torch.save(network, "trained.pt")
    assert not is_skipped(capsys, *words)


def test_a_box_that_is_found_again_is_skipped(capsys: pytest.CaptureFixture[str]) -> None:
    photo = str(ROOT / "assets" / "grace_hopper.jpg")
    words = [photo, "--model", "nanodet", "--method", "saliency", "--target", "tie"]
    assert main(words) == 0
    assert is_skipped(capsys, *words)
