"""What counts as the address of a daemon, and what its parts are."""

from __future__ import annotations

import pytest

from ctxreuse.daemon.address import Address, is_url, parse_address
from ctxreuse.daemon.client import Client
from ctxreuse.errors import ConfigError, LinkDownError


@pytest.mark.parametrize(
    ("text", "address", "url"),
    [
        ("http://127.0.0.1:7351", Address("http", "127.0.0.1", 7351), "http://127.0.0.1:7351"),
        ("https://edge.example", Address("https", "edge.example", 443), "https://edge.example:443"),
        ("http://a%40b@[::1]:80/", Address("http", "::1", 80, "a@b"), "http://[::1]:80"),
    ],
)
def test_parts_of_an_address(text: str, address: Address, url: str) -> None:
    assert is_url(text)
    assert parse_address(text) == address
    assert address.url == url


@pytest.mark.parametrize("text", ["ftp://127.0.0.1", "http://", "http://h:70000", "http://[::1", "smollm2", "/folder"])
def test_what_is_no_address_says_how_to_write_one(text: str) -> None:
    with pytest.raises(ConfigError, match=r"127\.0\.0\.1:7351"):
        parse_address(text)


def test_names_and_folders_are_no_urls() -> None:
    assert not any(map(is_url, ["smollm2", "./https", "/models/http:", "C:\\models", "https"]))


def test_https_is_spoken_to_a_server_with_tls() -> None:
    with pytest.raises(LinkDownError, match="no daemon answers"):
        Client("https://127.0.0.1:1").call("GET", "/")
