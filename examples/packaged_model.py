"""Put a model into one file with the code that it is made of, and open it where that code is not
installed.

    python examples/packaged_model.py                 write packaged.pt, then open and explain it in
                                                      another process
    python examples/packaged_model.py --output FILE   write another file
    python examples/packaged_model.py --open FILE     only open and explain: this runs the code in
                                                      the file

The model is the bundled classifier inside of a class of one's own, from a module that exists for
this example only. It imports a module that sends statistics somewhere, which the archive replaces
by a mock. `export_package` calls back for each module that goes in or is mocked, and adds a note to
the archive; the report lists what became of all of them.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import explain
from explain import ExplainError
from explain.distributed.packaging import export_package, import_package
from explain.models.bundled import load_tiny

PHOTO = Path(__file__).resolve().parents[1] / "assets" / "chelsea.png"
SOURCES = {
    "my_network": '''
from torch import nn
import my_statistics

class Calibrated(nn.Module):
    """Divides the logits of another network by a temperature."""

    def __init__(self, network, temperature):
        super().__init__()
        self.network, self.temperature = network, temperature

    def forward(self, x):
        return self.network(x) / self.temperature

    def report(self):
        my_statistics.send("used")
''',
    "my_statistics": "def send(text): print(text)",
}


def goes_in(exporter: Any, name: str) -> None:
    print(f"    {name} goes in")
    exporter.save_text("notes", f"{name}.txt", "packaged by examples/packaged_model.py")


def is_mocked(exporter: Any, name: str) -> None:
    print(f"    {name} is mocked")


def write(path: Path, overwrite: bool) -> None:
    """Make the model from modules in a temporary folder, and write the archive."""
    bundled = load_tiny()
    with tempfile.TemporaryDirectory() as folder:
        for name, source in SOURCES.items():
            Path(folder, f"{name}.py").write_text(source, "utf-8")
        sys.path.insert(0, folder)
        try:
            importlib.invalidate_caches()
            model = importlib.import_module("my_network").Calibrated(
                bundled.model, bundled.temperature
            )
            report = export_package(
                model,
                path,
                categories=bundled.categories,
                mock="my_statistics",
                on_intern=goes_in,
                on_mock=is_mocked,
                overwrite=overwrite,
            )
        finally:
            sys.path.remove(folder)
            for name in SOURCES:
                sys.modules.pop(name, None)
    print(f"{report}\nmodel, code and labels written to {path}")


def open_and_explain(path: Path) -> None:
    """Explain a photo with what an archive holds."""
    packaged = import_package(path)
    explainer = explain.Explainer(
        packaged.model, packaged.categories, explain.Explainer("tiny").preprocess
    )
    explanation = explainer(PHOTO, "gradcam")
    picture = path.with_name(f"{path.stem}-gradcam.png")
    explanation.overlay("gradcam").save(picture)
    label, probability = explanation.predictions[0]
    print(
        f"{type(packaged.model).__name__} out of the archive: {PHOTO.name} is {label!r}, "
        f"{probability:.0%}"
    )
    print(f"overlay written to {picture}")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--output", type=Path, default=Path("packaged.pt"), help="the archive to write"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace an archive that is there already"
    )
    parser.add_argument(
        "--open", type=Path, metavar="FILE", help="open this archive, and write none"
    )
    options = parser.parse_args(arguments)
    if options.open:
        open_and_explain(options.open)
        return
    write(options.output, options.overwrite)
    sys.stdout.flush()
    done = subprocess.run([sys.executable, __file__, "--open", str(options.output)], check=False)
    if done.returncode:
        sys.exit(done.returncode)


if __name__ == "__main__":
    try:
        main()
    except (ExplainError, OSError) as error:
        sys.exit(f"packaged_model.py: {error}")
