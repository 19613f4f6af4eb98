"""What a source finds: names, labels and boxes, of folders, lists, shards and data sets."""

from __future__ import annotations

import gzip
import io
import json
import math
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from explain import ExplainWarning, RunError
from explain.data.images import load_image
from explain.runs import Source
from explain.runs.labels import Labels
from explain.store.lists import source_of
from explain.store.sources import as_label
from tests.runs.networks import explainer, folder_of, picture, stored_run


def listed(source: Source) -> list[tuple[str, Any, Any]]:
    entries = [entry for entry in source.entries() if entry.problem is None]
    assert source.count in (None, len(entries))
    return [(entry.name, entry.label, entry.boxes) for entry in entries]


def read(source: Source, name: str) -> tuple[bytes, Any]:
    entry = next(entry for entry in source.entries() if entry.name == name)
    content = source.read(entry)
    return load_image(content.image).tobytes(), content.label


def test_lists_have_labels_and_boxes(tmp_path: Path) -> None:
    folder_of(tmp_path / "photos", 3)
    table = tmp_path / "list.csv"
    table.write_text(
        "\ufeffPath, label,x0,y0,x1,y1\nphotos/000.png,cat,1,2,5,6\nphotos/001.png,3,,,,\n"
        'photos/000.png,cat,0,0,2,2.5\n"photos/002.png",,,,,\n'
    )
    boxes = ((1.0, 2.0, 5.0, 6.0), (0.0, 0.0, 2.0, 2.5))
    names = [f"photos/{number:03}.png" for number in range(3)]
    expected = [(names[0], "cat", boxes), (names[1], 3, ()), (names[2], None, ())]
    assert listed(source_of(table)) == expected
    assert read(source_of(table), names[1])[0] == picture(1).tobytes()
    first = {"image": names[0], "label": "cat", "boxes": boxes}
    rows: list[Any] = [first, {"image": names[1], "label": 3}, names[2]]
    (tmp_path / "list.json").write_text(json.dumps(rows))
    (tmp_path / "list.jsonl").write_text("\n".join([*map(json.dumps, rows), ""]))
    cells = [f"{names[0]}\tcat\t{json.dumps(boxes)}", f"{names[1]}\t3\t", f"{names[2]}\t\t"]
    (tmp_path / "list.tsv").write_text("\n".join(["file\tlabel\tboxes", *cells]))
    for ending in ("json", "jsonl", "tsv"):
        assert listed(source_of(tmp_path / f"list.{ending}")) == expected


SEVERAL = {
    "nih.csv": "Image Index,Finding Labels,Patient Age\na.png,Mass|Edema,58\nb.png,No Finding,2\nc.png,,\n",
    "excel.csv": "photo;labels\na.png;Mass|Edema\nb.png;No Finding\nc.png;\n",
    "semicolon.tsv": "photo\tlabels\na.png\tMass; Edema\nb.png\tNo Finding\nc.png\t\n",
    "pandas.csv": "photo,labels\na.png,\"['Mass', 'Edema']\"\nb.png,['No Finding']\nc.png,\n",
    "lines.csv": "path,label\na.png,Mass\nb.png,No Finding\na.png,Edema\nc.png,\n",
    "list.json": json.dumps(
        [
            {"file_name": "a.png", "labels": ["Mass", "Edema"]},
            {"file_name": "b.png", "labels": ["No Finding"]},
            "c.png",
        ]
    ),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_labels_of_a_photo_are_read_in_the_forms_that_people_have(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(SEVERAL[name])
    expected = [("a.png", ("Mass", "Edema"), ()), ("b.png", "No Finding", ()), ("c.png", None, ())]
    assert listed(source_of(tmp_path / name)) == expected


def test_a_column_for_each_class_says_what_is_true_what_is_not_and_what_is_uncertain(
    tmp_path: Path,
) -> None:
    file = tmp_path / "list.csv"
    file.write_text("Path,Sex,Age,Edema,Mass\nv1/a.png,F,61,1.0,-1.0\nv1/b.png,M,7,,0.0\n")
    labels = Labels(["Mass", "Edema"])
    stored = [labels.of(label) for _, label, _ in listed(source_of(file))]
    assert stored == [[(1, "Edema"), (0, "Mass", "uncertain")], []]
    # of data sets, also without labels
    assert Labels(None).of(as_label((0, 0, 0))) == []
    doubtful = Labels(None).of(as_label([1.0, math.nan, 0.0]))
    assert doubtful == [(0, "class 0"), (1, "class 1", "uncertain")]
    (tmp_path / "vectors.jsonl").write_text('{"path": "a.png", "label": [1, 0, 1]}\n')
    # on two lines, one for each box of the photo
    (tmp_path / "pandas.csv").write_text('path,label\na.png,"[1, 0, 1]"\na.png,"[1, 0, 1]"\n')
    for name in ("vectors.jsonl", "pandas.csv"):
        assert listed(source_of(tmp_path / name)) == [("a.png", (1, 0, 1), ())]
    for content, message, label in (
        ("photo,diagnosis\na.png,Edema\n", "its columns diagnosis are not read", None),
        ("photo,Mass,Edema\na.png,0.7,1\n", "column 'Mass' must have 0 or 1", "Edema"),
    ):
        file.write_text(content)
        with pytest.warns(ExplainWarning, match=message):
            assert listed(source_of(file)) == [("a.png", label, ())]


COCO = {
    "images": [{"id": 7, "file_name": "000.png"}, {"id": 3, "file_name": "in/001.png"}],
    "categories": [{"id": 90, "name": "dog"}, {"id": 2, "name": "red cat"}],
    "annotations": [
        {"image_id": 7, "category_id": 90, "bbox": [1, 2, 3, 4]},
        {"image_id": 7, "category_id": 2, "bbox": [0, 0, 10.5, 9]},
        {"image_id": 7, "category_id": 2, "bbox": [5, 5, 0, 2]},
    ],
}


def test_annotations_of_coco_are_joined_to_the_photos_by_the_ends_of_their_paths(
    tmp_path: Path,
) -> None:
    photos = folder_of(tmp_path / "photos", 1)
    folder_of(photos / "in", 2)
    file = photos / "instances.json"
    file.write_text(json.dumps(COCO))
    boxes = ((1.0, 2.0, 4.0, 6.0, "dog"), (0.0, 0.0, 10.5, 9.0, "red cat"))
    first = ("000.png", ("dog", "red cat"), boxes)
    assert listed(source_of(file)) == [first, ("in/001.png", (), ())]
    all_listed = [first, ("in/000.png", None, ()), ("in/001.png", (), ())]
    assert listed(source_of(photos, file)) == all_listed
    assert listed(source_of(photos / "in", file)) == [first, ("001.png", (), ())]
    (tmp_path / "other.csv").write_text("path,label\nphoto.png,dog\n")
    with pytest.raises(RunError, match=r"such as '000.png', got 'photo.png'"):
        source_of(photos, tmp_path / "other.csv")
    file.write_text(json.dumps(COCO | {"categories": []}))
    with pytest.raises(RunError, match="annotations as COCO has them, but KeyError: 90"):
        listed(source_of(file))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", f'path,boxes\na.png,"[[0, 0, 1{"0" * 400}, 3]]"\n', "photo 1: boxes must"),
        ("a.csv", f"path,boxes\na.png,{'[' * 50000}\n", "photo 1"),
        ("a.csv", "path,x0,y0,x1,y1\na.png,5,0,2,2\n", "photo 1: boxes must"),
        ("a.csv", "path,boxes\na.png,[1\n", r"photo 1: Expecting"),
        ("a.csv", "path,x0\na.png,5\n", "photo 1: boxes must"),
        ("a.csv", "pth,label\na.png,cat\n", "must have an image under one of path"),
        ("a.json", '{"a.png": 1}', "source .* must hold a JSON list"),
        ("a.json", "[1", "Expecting"),
        ("a.json", "[1]", "photo 1: must"),
        ("a.csv", "path\n\xff", "'utf-8'"),
    ],
)
def test_a_list_that_is_none_is_refused_by_its_line(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(RunError, match=message) as caught:
        listed(source_of(tmp_path / name))
    assert str(caught.value).startswith(f"source '{tmp_path}")


def shard(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    picture(number).save(buffer, format="PNG")
    return buffer.getvalue()


def test_shards_hold_photos_with_labels(tmp_path: Path) -> None:
    description = json.dumps({"label": "dog", "boxes": [[0, 0, 3, 4]]}).encode()
    first = {"a.png": png(1), "a.cls": b"7\n"}
    deeper = {"in/a.txt": b"cat", "in/a.seg.png": b"x", "in/a.png": png(2)}
    shard(tmp_path / "s-08.tar", first | deeper)
    second = {"b.json": description, "b.png": png(3), "c.txt": b"no photo"}
    shard(tmp_path / "s-09.tar", second)
    expected = [
        ("s-08.tar/a", 7, ()),
        ("s-08.tar/in/a", "cat", ()),
        ("s-09.tar/b", "dog", ((0.0, 0.0, 3.0, 4.0),)),
    ]
    for pattern in ("s-{08..09}.tar", "s-*.tar", ""):
        source = source_of(str(tmp_path / pattern))
        assert listed(source) == expected
        assert read(source, "s-08.tar/in/a")[0] == picture(2).tobytes()
    assert len(listed(source_of(tmp_path / "s-09.tar"))) == 1


def test_a_damaged_shard_is_told_and_the_others_are_read(tmp_path: Path) -> None:
    sound = shard(tmp_path / "d.tar", {f"{number}.png": png(number) for number in range(3)})
    whole = sound.read_bytes()
    second = whole.index(b"1.png")
    (tmp_path / "a.tar").write_bytes(whole[: second + 700])
    (tmp_path / "b.tar").write_bytes(whole[:second] + b"\xff" * 600 + whole[second + 600 :])
    (tmp_path / "c.tar").write_bytes(gzip.compress(whole))
    entries = list(source_of(str(tmp_path / "[a-d].tar")).entries())
    problems = {entry.name: entry.problem for entry in entries if entry.problem is not None}
    assert list(problems) == ["a.tar", "b.tar", "c.tar"]
    assert all("is damaged or no plain tar file" in problem for problem in problems.values())
    names = {entry.name for entry in entries if entry.problem is None}
    assert {"b.tar/0", "d.tar/0", "d.tar/1", "d.tar/2"} <= names


class Items:
    """What data sets of PyTorch are: a length, and items by number."""

    def __init__(self, items: list[Any], **attributes: Any) -> None:
        self.items = items
        vars(self).update(attributes)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: int) -> Any:
        return self.items[place]


def test_a_folder_of_torchvision_and_its_subsets_keep_the_names_of_their_files(
    tmp_path: Path,
) -> None:
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder

    folders = [folder_of(tmp_path / label, 1) for label in ("cat", "dog")]
    names = [str(folder / "000.png") for folder in folders]
    images = ImageFolder(str(tmp_path))
    assert [name for name, _, _ in listed(source_of(images))] == names
    subset = Subset(Subset(images, [1, 0]), [1, 0])
    assert [name for name, _, _ in listed(source_of(subset))] == names
    assert read(source_of(subset), names[1]) == (picture(0).tobytes(), 1)


def hugging_face(rows: list[dict[str, Any]], **features: Any) -> Any:
    """Something with the attributes of ``datasets.Dataset`` that are used."""
    return Items(rows, features=features, column_names=list(features), _fingerprint="abc")


def test_the_columns_of_a_hugging_face_data_set_are_found_by_their_features() -> None:
    kinds = {name: type(name, (SimpleNamespace,), {}) for name in ("Image", "ClassLabel", "Value")}
    rows = [
        {"id": 1, "picture": picture(0), "kind": 1},
        {"id": 2, "picture": {"bytes": png(1), "path": None}, "kind": 0},
    ]
    labels = kinds["ClassLabel"](names=["cat", "dog"])
    features = {"id": kinds["Value"](), "picture": kinds["Image"](), "kind": labels}
    data_set = hugging_face(rows, **features)
    source = source_of(data_set)
    assert read(source, "item 0") == (picture(0).tobytes(), 1)
    assert read(source, "item 1") == (picture(1).tobytes(), 0)
    assert (source.classes, source.identity()["fingerprint"]) == (["cat", "dog"], "abc")
    with pytest.raises(RunError, match="column"):
        source_of(hugging_face(rows, id=features["id"]))
    with pytest.raises(RunError, match="several"):
        source_of({"train": data_set, "test": data_set})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("none", "source 'none' must"),
        ("none.csv", "source"),
        ("none-*.tar", "pattern"),
        ("none.tar", "source"),
        (__file__, "got .py"),
        (3, "source must"),
        (b"abc", "source must"),
    ],
)
def test_what_is_no_source_is_refused(value: Any, message: str) -> None:
    with pytest.raises(RunError, match=message):
        source_of(value)


LABELS: list[tuple[Any, tuple[str, ...]]] = [
    ("a\ud800", ("a\\ud800",)),
    (2**63, (str(2**63),)),
    (3.0, ("fishing reel",)),
    (2.5, ("2.5",)),
    (True, ("owl",)),
    (np.array([0, 1, 0, 1, 0]), ("owl", "fishing reel")),
    (math.nan, ()),
    ({"boxes": [[0, 0, 1, 1]]}, ()),
]


def test_labels_of_any_kind_are_kept(tmp_path: Path) -> None:
    network = explainer(categories=["cat", "owl", "dog", "fishing reel", "e"])
    photos = [(picture(number), label) for number, (label, _) in enumerate(LABELS)]
    for _ in range(2):
        run = stored_run(tmp_path, photos, network)
        assert [row.labels for row in run.rows()] == [labels for _, labels in LABELS]


def test_labels_are_found_by_name_and_never_guessed() -> None:
    names = ["tench, Tinca tinca", "crane", "crane", "golden retriever", "retriever, tench"]
    labels = Labels(names)
    for label, number in {
        "Golden_Retriever": 3,
        "tench": None,  # a part of two labels
        "tinca-tinca": 0,
        "crane": None,
        "golden retriever, crane": None,
        4: 4,
        5: None,
    }.items():
        expected = str(label) if number is None else names[number]
        assert labels.of(label) == [(number, expected)]
    assert labels.of(None) is None
    assert labels.of("golden retriever, Tinca tinca") == [(3, names[3]), (0, names[0])]
    assert Labels(None).of(7) == [(7, "class 7")]
    named = Labels(["cat", "dog", "owl"], classes=["owl", "bat", "cat"])
    assert named.of((0, 1, 2, 0)) == [(2, "owl"), (None, "bat"), (0, "cat")]
    assert named.of((1, 0, 1)) == [(2, "owl"), (0, "cat")]  # zeros and ones for each class
    # none of its names is known here
    assert Labels(["cat", "dog"], classes=["n01", "n02"]).of(1) == [(1, "dog")]
