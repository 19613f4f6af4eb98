"""How long a Grad-CAM takes in the app, for one who asks alone and while twenty ask at once.

    python examples/benchmarks/app.py [--users 1 20] [--rounds 10] [--model NAME]

Starts the app on a free port of this machine, and asks it over HTTP as the page does: each user
sends a photo, and then asks for the Grad-CAM of its best answer again and again, without a pause. A
figure is the time from the question to the map, in milliseconds. An answer without a map, or with
another status than 200, counts as failed. The extra ``app`` is needed; the users are threads of the
same process, and share its processors.
"""

from __future__ import annotations

import argparse
import http.client
import importlib.util
import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tables import Table, line

import explain
from explain.app import application
from explain.app.service import Service
from explain.app.web import bound

ASSETS = Path(__file__).resolve().parents[2] / "assets"
MARKED = {"x-explain": "1"}
USERS = [1, 20]
COLUMNS = ("concurrent users", "median, ms", "95th percentile, ms", "requests", "failed")


def named(users: int) -> str:
    return str(users)


def table() -> Table:
    return Table("app", COLUMNS, tuple((named(users),) for users in USERS))


def percentile(seconds: list[float], share: float) -> float:
    """The smallest of the values that a share of all do not exceed.

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.75)
    3.0
    """
    ranked = sorted(seconds)
    return ranked[max(0, -int(-share * len(ranked) // 1) - 1)]


def post(connection: http.client.HTTPConnection, path: str, body: bytes) -> bytes:
    connection.request("POST", path, body, MARKED)
    reply = connection.getresponse()
    content = reply.read()
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {content.decode()}")
    return content


def user(port: int, rounds: int, content: bytes) -> tuple[list[float], int]:
    """Send a photo, ask about it, and return the seconds of each answer, and how many failed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    seconds = []
    failed = 0
    photo = json.loads(post(connection, "/api/photos", content))["photo"]
    for _ in range(rounds):
        begun = time.perf_counter()
        try:
            steps = post(
                connection, "/api/explain", json.dumps({"photo": photo}).encode()
            ).splitlines()
            failed += "item" not in json.loads(steps[-1])
        except (OSError, RuntimeError):
            failed += 1
            connection.close()
        seconds.append(time.perf_counter() - begun)
    return seconds, failed


@contextmanager
def served(model: str | None) -> Iterator[int]:
    """The app at a port of this machine."""
    import uvicorn

    service = Service([explain.Explainer(model)])
    server = uvicorn.Server(
        uvicorn.Config(application(service), log_level="warning", lifespan="off", ws="none")
    )
    with bound("127.0.0.1", 0) as socket:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [socket]}, daemon=True)
        thread.start()
        yield socket.getsockname()[1]
        server.should_exit = True
        thread.join()
    service.close()


def measured(port: int, users: int, rounds: int, content: bytes) -> list[str]:
    """The cells of a row."""
    with ThreadPoolExecutor(users) as people:
        found = list(people.map(lambda _: user(port, rounds, content), range(users)))
    seconds = [each for answers, _ in found for each in answers]
    figures = (statistics.median(seconds), percentile(seconds, 0.95))
    return [
        *(f"{1000 * each:.0f}" for each in figures),
        str(len(seconds)),
        str(sum(each for _, each in found)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--users", type=int, nargs="+", default=USERS)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default=None)
    options = parser.parse_args()
    print(f"\n{table().head()}")
    if importlib.util.find_spec("uvicorn") is None:
        for users in options.users:
            print(line([named(users), *["not installed"] * (len(COLUMNS) - 1)]))
        return
    content = (ASSETS / "chelsea.png").read_bytes()
    with served(options.model) as port:
        user(port, 3, content)  # the first question looks the network over
        for users in options.users:
            print(line([named(users), *measured(port, users, options.rounds, content)]), flush=True)


if __name__ == "__main__":
    main()
