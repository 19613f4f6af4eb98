"""Write a report of the photos in assets/: one file for any browser; and a picture of it, with the
extra "browser".

python examples/report_page.py [FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
from pathlib import Path

import explain

PHOTOS = ["astronaut.png", "chelsea.png", "coffee.png", "grace_hopper.jpg", "rocket.jpg"]
METHODS = ["gradcam", "layercam", "hirescam", "integratedgradients", "guidedbackprop"]
STEPS = 16
VIEW = "#photo=0&target=1"
ASSETS = Path(__file__).resolve().parents[1] / "assets"
FILE = ASSETS / "report.html"


def main(file: Path = FILE) -> None:
    photos = [os.path.relpath(ASSETS / name) for name in PHOTOS]  # records have these paths
    explanations = explain.Explainer(crop="whole")(photos, METHODS, top_k=2)
    explain.report.sheet(explanations, file, steps=STEPS, title="Five photos", overwrite=True)
    print(f"wrote {file}, {file.stat().st_size / 1e6:.2f} MB")
    browser = os.environ.get("EXPLAIN_CHROMIUM") or shutil.which("chromium")
    if browser and importlib.util.find_spec("playwright"):
        picture = file.with_suffix(".jpg")
        photograph(file, browser, picture)
        print(f"wrote {picture}")


def photograph(file: Path, browser: str, picture: Path) -> None:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        window = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page(viewport={"width": 1240, "height": 1100})
        page.goto(file.absolute().as_uri() + VIEW)
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(1500)
        page.screenshot(path=picture, type="jpeg", quality=86)
        window.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=FILE, help="the page to write (assets/report.html)"
    )
    main(parser.parse_args().file)
