"""The options of the command line, and which values they take."""

from __future__ import annotations

import argparse
from typing import NoReturn

from explain.errors import printable


def command_line() -> argparse.ArgumentParser:
    """Return the parser of `explain`'s command line."""
    parser = _Parser(
        prog="explain",
        description="See why a vision model said what it said: writes overlays of the photos given.",
        epilog="example: explain cat.jpg --method gradcam --method guidedbackprop --target tabby",
    )
    add = parser.add_argument
    add("images", nargs="*", metavar="IMAGE", help="photos, and folders of photos")
    add(
        "--method",
        "-m",
        action="append",
        metavar="NAME",
        help="how to explain; repeatable, or 'all' (default: gradcam)",
    )
    add(
        "--target",
        "-t",
        action="append",
        metavar="CLASS",
        help="label or index to explain; repeatable (default: the top one)",
    )
    add("--top-k", type=_count, metavar="K", help="explain the K best classes")
    add("--layer", action="append", metavar="NAME", help="layer to look at; repeatable (default: the last feature map)")
    add("--fuse", choices=["mean", "max", "product"], help="how the maps of several layers become one (default: mean)")
    add(
        "--model",
        metavar="NAME",
        help="tiny, a torchvision name, or package.module:factory (default: efficientnet-lite0)",
    )
    add("--weights", metavar="FILE", help="state dict to load into the model")
    add("--labels", metavar="FILE", help="the labels of the classes, one a line")
    add("--size", type=_count, metavar="PIXELS", help="side of the model's input")
    add("--crop", choices=["center", "whole", "five"], default="center", help="the part of a photo that the model sees")
    add("--device", default=None, metavar="NAME", help="cpu, cuda, cuda:1, mps, ...")
    add("--batch-size", type=_count, metavar="N", help="inputs at once in methods that run the model many times")
    add("--bf16", action="store_true", help="run these in bfloat16")
    add("--output", "-o", default="explained", metavar="FOLDER", help="where to write (default: explained)")
    add("--alpha", type=_opacity, default=0.6, metavar="A", help="opacity of the heat, 0 to 1 (default: 0.6)")
    add("--colormap", default=None, metavar="NAME", help="any colour map of matplotlib")
    add("--force", action="store_true", help="overwrite files that are there")
    add("--json", action="store_true", help="print one JSON document instead of lines")
    add("--inspect", action="store_true", help="print what every layer of the model does with the image, and stop")
    add("--concepts", type=_count, metavar="K", help="draw the K concepts that a layer sees in the image, and stop")
    add("--list-methods", action="store_true", help="list the methods and stop")
    add("--list-layers", action="store_true", help="list the model's layers and stop")
    add("--list-models", action="store_true", help="list the models that have a name and stop")
    return parser


class _Parser(argparse.ArgumentParser):
    """One whose complaints repeat what was typed, or what a shell made of ``*``, without obeying it."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text!r}")
    return int(text)


def _opacity(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, got {text!r}")
    return value
