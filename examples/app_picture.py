"""Take a picture of the app with a photo from assets/, as the README shows it; needs the extra
"browser".

python examples/app_picture.py [FILE]
"""

from __future__ import annotations

import argparse
import os
import shutil
import threading
from pathlib import Path

import explain
from explain.app import application
from explain.app.service import Service
from explain.app.web import bound

PHOTOS = ["astronaut.png", "chelsea.png", "coffee.png", "grace_hopper.jpg", "rocket.jpg"]
METHODS = ["gradcam", "layercam", "hirescam", "guidedbackprop"]
SIZE = {"width": 1240, "height": 1100}
ASSETS = Path(__file__).resolve().parents[1] / "assets"
FILE = ASSETS / "app.jpg"


def main(file: Path = FILE) -> None:
    import uvicorn

    service = Service(
        [explain.Explainer(crop="whole")], examples={name: ASSETS / name for name in PHOTOS}
    )
    server = uvicorn.Server(
        uvicorn.Config(application(service), log_level="warning", lifespan="off", ws="none")
    )
    with bound("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        photograph(f"http://127.0.0.1:{socket.getsockname()[1]}/", file)
        server.should_exit = True
        thread.join()
    service.close()
    print(f"wrote {file}, {file.stat().st_size / 1e3:.0f} kB")


def photograph(address: str, file: Path) -> None:
    from playwright.sync_api import sync_playwright

    browser = os.environ.get("EXPLAIN_CHROMIUM") or shutil.which("chromium")
    with sync_playwright() as driver:
        window = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = window.new_page(viewport=SIZE)
        page.set_default_timeout(180_000)
        page.goto(address)
        page.get_by_role("button", name="chelsea.png").click()
        page.locator(".viewer").wait_for()
        page.locator("details.choice summary").click()
        for name in METHODS[1:]:
            page.locator(f".method-list input[value={name}]").check()
        page.locator("details.choice summary").click()
        page.locator("button.answer").first.click()
        page.locator(".film .frame").nth(len(METHODS) - 1).wait_for()
        page.wait_for_timeout(2500)
        page.screenshot(path=file, type="jpeg", quality=86)
        window.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", nargs="?", type=Path, default=FILE, help="the JPEG to write (assets/app.jpg)"
    )
    main(parser.parse_args().file)
