"""What comes from anybody: names of files and hosts, requests in JSON, and regions to cover."""

from __future__ import annotations

import pytest
import torch
from PIL import Image

from explain import ExplainError
from explain.app.requests import (
    CheckRequest,
    CoveredRegion,
    ExplainRequest,
    Limits,
    decode_upload,
    file_name,
    read_request,
)
from explain.app.service import Cache
from explain.app.tasks import unfinished
from explain.app.web import cookie_name, host_name
from explain.data.boxes import Box
from explain.methods.base import get_method


def test_the_name_of_an_upload_is_no_path() -> None:
    names = ("C:\\photos\\cat.jpg", "../../etc/passwd", "/..", "a/\x1bcat.png")
    assert [file_name(name) for name in names][:3] == ["cat.jpg", "passwd", "photo"]
    assert "\x1b" not in file_name(names[3])
    with pytest.raises(ExplainError, match=r"cat\.jpg"):
        decode_upload(b"", "cat.jpg", Limits())


def test_hosts_are_read_without_ports() -> None:
    hosts = ("LocalHost:8000", "[::1]:8000", "a b", "x@127.0.0.1")
    assert [host_name(host) for host in hosts] == ["localhost", "::1", None, None]
    cookies = [cookie_name(host) for host in ("box:8000", "[::1]")]
    assert cookies == ["explain-token-8000", "explain-token"]


def test_fields_that_are_null_have_their_defaults() -> None:
    values = {"answer": "abc", "what": "check", "target": None}
    assert read_request(CheckRequest, values).target == 0
    request = ExplainRequest.of({"photo": "abc", "targets": [3]}, 1, Limits())
    assert (request.targets, list(request.chosen)) == ((3,), ["gradcam"])


def test_a_region_is_covered_where_the_model_sees_it() -> None:
    grey = Image.new("RGB", (60, 40), (100, 100, 100))
    covered = CoveredRegion((0.0, 0.0, 0.5, 1.0), "zero").apply(grey, Box(10, 0, 50, 40))
    levels = [covered.getpixel((x, 20)) for x in (5, 15, 45)]
    assert levels == [(100, 100, 100), (0, 0, 0), (100, 100, 100)]


def test_a_cache_lets_go_what_was_used_least_lately() -> None:
    cache = Cache[str]("photo", 2)
    first, second = cache.add("a"), cache.add("b")
    assert cache[first] == "a"
    third = cache.add("c")
    assert (cache[first], cache[third], second in cache) == ("a", "c", False)


def test_a_map_that_is_not_finished_says_so() -> None:
    shown = unfinished(get_method("rise"), torch.rand(4, 5), 30, 1000)
    assert (shown["plane"]["height"], shown["plane"]["width"]) == (4, 5)
    assert "30 of 1000" in shown["remark"]
