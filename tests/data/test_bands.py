"""Images of several bands: read from TIFF and NumPy, whole for the model, three of them in pictures."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import explain
from explain import ImageError, ModelError
from explain.cli import main
from explain.data.bands import Bands
from explain.data.images import load_image
from tests.conftest import Made, settled

COUNT = 5
SHAPE = (COUNT, 24, 30)


def pixels(dtype: str = "uint16", shape: tuple[int, ...] = SHAPE, seed: int = 0) -> Any:
    """With 12 bits, so that 4095 is white; of bytes, 255."""
    most = {"uint8": 255, "float32": 1.0}.get(dtype, 4095)
    values = np.random.default_rng(seed).random(shape)
    values.flat[0] = 1
    return (values * most).astype(dtype)


def tiff(values: Any, planes: bool) -> bytes:
    """A TIFF file with the bands of each pixel, or plane by plane, written by hand."""
    count, height, width = values.shape
    arranged = values if planes else np.moveaxis(values, 0, -1)
    data = np.ascontiguousarray(arranged).tobytes()
    strips = count if planes else 1
    entries = 10
    after = 8 + 2 + 12 * entries + 4
    kind = {"u": 1, "i": 2, "f": 3}[values.dtype.kind]
    bits = struct.pack(f"<{count}H", *[8 * values.dtype.itemsize] * count)
    formats = struct.pack(f"<{count}H", *[kind] * count)
    offsets_at = after + len(bits) + len(formats)
    starts_at = offsets_at + 8 * strips if planes else offsets_at
    length = len(data) // strips
    starts = [starts_at + number * length for number in range(strips)]
    tables = struct.pack(f"<{2 * strips}I", *starts, *[length] * strips) if planes else b""
    fields = [
        (256, 4, 1, width),
        (257, 4, 1, height),
        (258, 3, count, after),
        (259, 3, 1, 1),
        (262, 3, 1, 1),
        (273, 4, strips, offsets_at if planes else starts_at),
        (277, 3, 1, count),
        (279, 4, strips, offsets_at + 4 * strips if planes else length),
        (284, 3, 1, 2 if planes else 1),
        (339, 3, count, after + len(bits)),
    ]
    head = struct.pack("<2sHIH", b"II", 42, 8, entries)
    directory = b"".join(struct.pack("<HHII", *field) for field in fields) + struct.pack("<I", 0)
    return head + directory + bits + formats + tables + data


def network(channels: int = COUNT) -> nn.Module:
    first = nn.Conv2d(channels, 6, 3, stride=2, padding=1)
    return settled(
        Made(
            lambda net, x: net.head(net.first(x).relu().mean((2, 3))),
            first=first,
            head=nn.Linear(6, 3),
        )
    ).eval()


def explainer(**options: Any) -> explain.Explainer:
    settings = {"size": 16, "crop": 1, "mean": 0.25, "std": 0.5, **options}
    return explain.Explainer(network(), **settings)


def by_hand(values: Any, white: float) -> torch.Tensor:
    """The central square, each band scaled alone, from 0 to 1 and then normalised."""
    planes = []
    for band in values:
        levels = Image.fromarray((band / white).astype(np.float32))
        square = levels.resize((16, 16), Image.Resampling.BILINEAR, box=(3, 0, 27, 24))
        planes.append(torch.from_numpy(np.array(square)))
    return (torch.stack(planes)[None] - 0.25) / 0.5


@pytest.mark.parametrize(("dtype", "white"), [("uint8", 255), ("uint16", 4095), ("float32", 1)])
@pytest.mark.filterwarnings("ignore:.*read as 12 bits")
def test_a_model_gets_all_bands_of_files_and_arrays(
    dtype: str, white: float, tmp_path: Path
) -> None:
    values = pixels(dtype)
    last = np.ascontiguousarray(np.moveaxis(values, 0, -1))
    np.save(tmp_path / "first.npy", values)
    np.save(tmp_path / "last.npy", last)
    (tmp_path / "planes.tif").write_bytes(tiff(values, planes=True))
    (tmp_path / "pixels.tif").write_bytes(tiff(values, planes=False))
    images: list[Any] = [*sorted(tmp_path.iterdir()), values, last]
    images.append((tmp_path / "pixels.tif").read_bytes())
    for image in images:
        x = explainer().as_input(image)
        torch.testing.assert_close(x, by_hand(values, white), rtol=1e-5, atol=1e-5)


def test_a_window_says_which_values_are_0_and_1() -> None:
    values = pixels()
    x = explainer(window=(5000, 10000)).as_input(values)
    torch.testing.assert_close(x, by_hand(values, 10000), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shown", [(4, 3, 2), (5,), ()])
def test_pictures_have_the_bands_that_are_asked_for(shown: tuple[int, ...]) -> None:
    values = pixels("uint8")
    picture = load_image(values, Bands(COUNT, shown))
    assert picture.mode == "RGB"
    expected = values[[number - 1 for number in shown or (1, 2, 3)]].astype(float)
    low, high = np.percentile(expected, (2, 98))
    levels = 255 * ((expected - low) / (high - low)).clip(0, 1)
    drawn = np.moveaxis(np.asarray(picture), -1, 0)
    assert np.abs(drawn - np.broadcast_to(levels, drawn.shape)).max() <= 0.51
    bands = shown[0] if len(shown) == 1 else shown  # a number stands for itself
    assert explainer(bands=bands)(values, "gradcam").photo.tobytes() == picture.tobytes()


@pytest.mark.parametrize(
    "shape",
    [(COUNT, 1, 30), (COUNT, 24, 1), (1, 30, COUNT), (COUNT, 1, 1), (1, COUNT, 24, 30)],
)
def test_an_image_may_be_one_pixel_high_or_wide(shape: tuple[int, ...]) -> None:
    values = pixels("float32", shape)
    bands: Any = load_image(values, Bands(COUNT))
    expected = np.moveaxis(values, -1, 0) if shape[-1] == COUNT else values.reshape(shape[-3:])
    assert np.array_equal(bands.bands, expected)


def test_four_bands_of_a_png_are_no_transparency(tmp_path: Path) -> None:
    values = pixels("uint8", (4, 24, 30))
    Image.fromarray(np.moveaxis(values, 0, -1), "RGBA").save(tmp_path / "near-infrared.png")
    four = explain.Explainer(network(4), size=16, crop=1, mean=0.25, std=0.5)
    x = four.as_input(tmp_path / "near-infrared.png")
    torch.testing.assert_close(x, by_hand(values, 255), rtol=1e-5, atol=1e-5)


def test_a_first_convolution_that_sees_rearranged_photos_leaves_them_in_colour() -> None:
    """As space-to-depth stems, of 12 channels for a photo of three."""
    folded = Made(
        lambda net, x: net.inner(nn.functional.pixel_unshuffle(x, 2)), inner=network(12)
    ).eval()
    with pytest.warns(explain.ExplainWarning, match="preprocess"):
        sees_colours = explain.Explainer(folded, size=16)
    assert sees_colours.as_input(Image.new("RGB", (20, 20))).shape == (1, 3, 16, 16)


@pytest.mark.filterwarnings("ignore:.*read as 12 bits")
def test_bands_are_kept_in_records_runs_and_digests(tmp_path: Path) -> None:
    folder = tmp_path / "tiles"
    folder.mkdir()
    np.save(folder / "a.npy", pixels())
    changed = pixels()
    changed[4] += 1  # which no picture shows
    np.save(folder / "b.npy", changed)
    (folder / "c.tif").write_bytes(tiff(pixels(seed=2), planes=False))
    ours = explainer(bands=(3, 2, 1))
    run = explain.run(folder, ours, output=tmp_path / "run.sqlite", workers=0)
    rows = {row.name: row for row in run.rows()}
    assert rows.keys() == {"a.npy", "b.npy", "c.tif"}
    assert rows["a.npy"].sha256 != rows["b.npy"].sha256
    for name, row in rows.items():
        explanation = ours(folder / name)
        torch.testing.assert_close(
            row.values, explanation["gradcam"].values[0], rtol=2e-3, atol=1e-5
        )
        assert row.picture().tobytes() == explanation.photo.tobytes()
    paths, failures = run.write_pictures("source", tmp_path / "pictures")
    assert (len(paths), failures) == (3, {})
    again = explain.run(folder, ours, output=tmp_path / "run.sqlite", workers=0)
    assert len(again) == 3

    saved = ours(folder / "a.npy").save(tmp_path / "saved")
    repeated = explain.load(saved[-1]).repeat(explainer=ours)
    assert repeated.photo.tobytes() == ours.read(folder / "a.npy").tobytes()
    with pytest.raises(explain.RecordError, match="pixels"):
        explain.load(saved[-1]).repeat(explainer=ours, image=folder / "b.npy")


CODE = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(5, 6, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    ).eval()
"""


def test_bands_are_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(CODE)
    Path("tiles").mkdir()
    np.save("tiles/a.npy", pixels("uint8"))
    Path("tiles/b.tif").write_bytes(tiff(pixels("uint8", seed=1), planes=True))
    model = ["--model", "./net.py:make", "--size", "16", "--mean", "0.5", "--std", "0.5"]
    assert main(["tiles", *model, "--bands", "4,3,2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [item["image"] for item in document["results"]] == ["tiles/a.npy", "tiles/b.tif"]
    arguments = document["results"][0]["records"][0]["explainer"]["arguments"]
    assert (arguments["channels"], arguments["size"]) == (5, 16)
    assert main(["run", "tiles", *model, "--bands", "4,3,2", "--output", "r.sqlite"]) == 0
    names = {row.name for row in explain.open_run("r.sqlite").rows()}
    assert names == {"a.npy", "b.tif"}
    for wrong in ("0,1,2", "1,2", "red"):
        assert main(["tiles/a.npy", *model, "--bands", wrong]) == 2
        assert "--bands must be" in capsys.readouterr().err
    assert main(["tiles/a.npy", "--model", "tiny", "--bands", "4,3,2"]) == 2
    assert "no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    "image", [np.zeros((3, 8, 9)), np.zeros((8, 9)), Image.new("RGB", (8, 9)), b"II*\0nothing"]
)
def test_images_of_other_bands_are_refused(image: Any, tmp_path: Path) -> None:
    with pytest.raises(ImageError) as refused:
        explainer()(image)
    assert "\n" not in str(refused.value)
    np.save(tmp_path / "scan.npy", pixels())
    with pytest.raises(ImageError, match="whole file"):
        explainer()(f"{tmp_path / 'scan.npy'} slice 1")


@pytest.mark.parametrize("options", [{"bands": (1, 9, 2)}, {"bands": (0,)}, {"bands": ("a",)}])
def test_bands_that_are_not_there_are_refused(options: Any) -> None:
    with pytest.raises(ImageError, match="bands must"):
        explainer(**options)
    with pytest.raises(ImageError, match="no effect"):
        explain.Explainer("tiny", bands=(1, 2, 3))
    with pytest.raises(ModelError, match="channels must"):
        explain.Explainer(network(), channels=0)
