"""The app over HTTP: what it answers, and whom it refuses."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from PIL import Image

import explain
from explain import AppError
from explain.app.requests import CheckRequest, ExplainRequest
from explain.app.service import Service
from explain.app.web import Access, access_for, address, bound
from tests.app.conftest import LIMITS, encoded
from tests.report.conftest import photo

pytest.importorskip("starlette", reason="the app needs Starlette: pip install -e '.[app]'")
HOST = "http://127.0.0.1:8000"
SELF = {"x-explain": "1"}


@pytest.fixture
def client(service: Service) -> Iterator[Any]:
    from starlette.testclient import TestClient

    from explain.app import application

    with TestClient(application(service), base_url=HOST, raise_server_exceptions=True) as client:
        yield client


def send(client: Any, content: bytes | None = None) -> Any:
    body = encoded(photo()) if content is None else content
    return client.post("/api/photos", content=body, headers=SELF | {"x-name": "my%20cat.png"})


def post(client: Any, path: str, **values: Any) -> Any:
    reply = client.post(f"/api/{path}", json=values, headers=SELF)
    assert reply.status_code == 200, reply.text
    return reply


def test_from_a_photo_to_a_saved_archive_and_report(
    client: Any, explainer: explain.Explainer
) -> None:
    name = send(client).json()
    assert name["name"] == "my cat.png"
    *_, line = post(client, "explain", photo=name["photo"]).text.splitlines()
    last = json.loads(line)
    assert last["item"]["predictions"][0][1] == explainer(photo()).predictions[0][1]
    picture = client.get(f"/{last['item']['photo']}")
    assert picture.headers["content-type"] == "image/jpeg"
    assert Image.open(io.BytesIO(picture.content)).size == (90, 60)
    saved = post(client, "save", answer=last["answer"])
    file_name = saved.headers["content-disposition"].rpartition("''")[2]
    assert file_name == "my-cat-explained.zip"
    names = zipfile.ZipFile(io.BytesIO(saved.content)).namelist()
    assert names == ["my-cat-gradcam.png", "my-cat-gradcam.npy", "my-cat-gradcam.json"]
    assert 'id="item-0"' in post(client, "report", answer=last["answer"]).text


def test_examples_methods_and_layers(client: Any) -> None:
    assert client.get("/example/stripes.png").headers["content-type"] == "image/jpeg"
    example = post(client, "examples", name="stripes.png").json()
    assert example["size"] == [90, 60]
    methods = post(client, "methods", model=0).json()
    quick = {method["name"]: method["quick"] for method in methods}
    assert (quick["gradcam"], quick["saliency"], quick["rise"]) == (True, True, False)
    layers = post(client, "layers", model=0, photo=example["photo"]).json()["layers"]
    assert layers[0] == ["first", "Conv2d", "16 x 16"]


@pytest.mark.parametrize(
    "path",
    [
        "/photo/..%2f..%2fetc%2fpasswd",
        "/example/..%2fpyproject.toml",
        "/../etc/passwd",
        "/static/app.js",
        "/example/stripes.png%00",
    ],
)
def test_there_are_no_files_behind_addresses(client: Any, path: str) -> None:
    assert client.get(path).status_code == 404


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/", {"host": "evil.example"}, 421),
        ("/photo/x", {"sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, 403),
    ],
)
def test_foreign_names_and_sites_are_refused(
    client: Any, path: str, headers: dict[str, str], status: int
) -> None:
    reply = client.get(path, headers=headers)
    assert reply.status_code == status
    assert "access-control-allow-origin" not in reply.headers
    assert client.post("/api/photos", headers={}).status_code == 403
    assert client.options(path, headers={"origin": "https://evil.example"}).status_code == 405


def test_photos_that_are_too_large_are_refused(client: Any) -> None:
    assert send(client, encoded(Image.new("RGB", (300, 200)))).status_code == 413
    assert send(client, b"x" * (LIMITS.upload + 1)).status_code == 413
    endless = (b"x" * 10_000 for _ in range(100))  # without a length
    assert client.post("/api/photos", content=endless, headers=SELF).status_code == 413
    assert send(client, b"no photo").status_code == 400


@pytest.mark.parametrize("body", [b"[]", b"\xff", b"[" * 1000])
def test_questions_that_are_none_are_refused(client: Any, body: bytes) -> None:
    for path in ("explain", "check", "stop", "save", "report", "methods", "layers", "examples"):
        assert client.post(f"/api/{path}", content=body, headers=SELF).status_code == 400, path


ODD: list[Any] = [
    None,
    True,
    -1,
    0.5,
    1e300,
    10**30,
    "",
    "x",
    "\ud800",
    "gradcam(",
    "\0",
    [],
    [[]],
    [{}],
    [None, "gradcam"],
    {},
    {"region": {}},
    {"region": [0, 0, 1, "1"]},
    {"region": None, "fill": 3},
    {"region": [0, 0, 1, 1], "fill": []},
    {"": 1},
    {"cls": 1},
    {"self": 1},
]
FIELDS = {
    "explain": [field.name for field in fields(ExplainRequest)],
    "check": [field.name for field in fields(CheckRequest)],
    "layers": ["photo", "model", "crop"],
    "methods": ["model"],
    "examples": ["name"],
    "stop": ["work"],
    "save": ["answer"],
    "report": ["answer"],
}


@pytest.mark.parametrize("path", FIELDS)
def test_odd_values_of_each_field_are_refused_in_one_line(path: str, client: Any) -> None:
    name = send(client).json()["photo"]
    good = {"photo": name}
    if path in ("check", "save", "report"):
        *_, line = post(client, "explain", photo=name).text.splitlines()
        good = {"answer": json.loads(line)["answer"]}
    for field in [*FIELDS[path], "nothing", "", "cls", "self"]:
        for value in ODD:
            values = {**good, field: value}
            content = json.dumps(values).encode()
            reply = client.post(f"/api/{path}", content=content, headers=SELF)
            words = reply.text
            if reply.status_code == 200:
                has_steps = path in ("explain", "check")
                last = json.loads(words.splitlines()[-1]) if has_steps else {}
                words = last.get("error", "none")
            else:
                assert reply.status_code in (400, 404), values
            assert re.fullmatch(".+", words), values
            assert not words.startswith("the model "), (values, words)


@pytest.mark.parametrize("host", ["[", "a:b:c", "::1", "x:99999999", "\xff", "localhost:²", ""])
def test_hosts_that_are_none_are_refused(client: Any, host: str) -> None:
    reply = client.get("/", headers={"host": host.encode("latin-1")})
    assert reply.status_code == 421


def test_the_token_leaves_the_address_and_becomes_a_cookie(service: Service) -> None:
    from starlette.testclient import TestClient

    from explain.app import application

    app = application(service, Access(("box",), "secret"))
    with TestClient(app, base_url="http://box:8000", follow_redirects=False) as client:
        assert client.get("/").status_code == 401
        assert client.get("/?token=other").status_code == 401
        reply = client.get("/?token=secret")
        assert (reply.status_code, reply.headers["location"]) == (303, "/")
        assert "httponly" in reply.headers["set-cookie"].lower()
        assert "samesite=strict" in reply.headers["set-cookie"].lower()
        assert client.get("/").status_code == 200
        assert send(client).status_code == 200


def test_apps_on_two_ports_of_a_machine_keep_their_tokens(service: Service) -> None:
    from starlette.testclient import TestClient

    from explain.app import application

    kept: Any = None
    for _ in range(2):
        for port, token in ((8000, "first"), (8001, "second")):
            app = application(service, Access(("box",), token))
            base = f"http://box:{port}"
            with TestClient(app, base_url=base, cookies=kept, follow_redirects=False) as client:
                if kept is None or len(kept) < 2:
                    client.get(f"/?token={token}")
                assert client.get("/").status_code == 200
                kept = client.cookies


def test_only_this_machine_is_listened_to_without_a_token() -> None:
    for host in ("127.0.0.1", "localhost", "::1", "127.0.0.2"):
        assert access_for(host).token is None
    for host in ("0.0.0.0", "::", "192.168.0.7", "box.example"):
        assert len(access_for(host).token or "") >= 32
    assert address("0.0.0.0", 8000, "t") == "http://0.0.0.0:8000/?token=t"
    with bound("127.0.0.1", 0) as one, pytest.raises(AppError, match="listened"):
        bound("127.0.0.1", one.getsockname()[1])
