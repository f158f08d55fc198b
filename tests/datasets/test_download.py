"""Files over HTTP, from a server that breaks, changes and lies as real ones do."""

import shutil
import socket
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from mutirao.datasets import download
from mutirao.datasets.download import Unreachable, check_address, fetch_file
from mutirao.errors import ConfigError
from shops import Shop, open_shop

CONTENT = bytes(range(256)) * 4000  # a megabyte


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shop]:
    monkeypatch.setattr(download, "RETRY_PAUSE", 0.0)
    monkeypatch.setattr(download, "CHUNK", 10_000)
    with open_shop(set__zip=CONTENT) as shop:
        yield shop


def test_a_file_comes_whole_and_is_watched(shop: Shop, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip", len(CONTENT), lambda *at: seen.append(at))
    assert (tmp_path / "set.zip").read_bytes() == CONTENT
    assert [p.name for p in tmp_path.iterdir()] == ["set.zip"], "nothing else is left"
    assert seen[-1] == (len(CONTENT), len(CONTENT))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


@pytest.mark.parametrize("size", [len(CONTENT), 0])
def test_a_broken_connection_goes_on_where_it_stopped(shop: Shop, tmp_path: Path, size: int) -> None:
    shop.cuts = [100_000, 50_000]
    fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip", size)
    assert (tmp_path / "set.zip").read_bytes() == CONTENT
    assert [wanted for _, wanted in shop.asked] == ["", "bytes=100000-", "bytes=150000-"]


def test_a_later_command_goes_on_too(shop: Shop, tmp_path: Path) -> None:
    shop.cuts = [300_000, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match=r"broke at 300,000 bytes of set\.zip; run the same command again"):
        fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip", len(CONTENT))
    assert (tmp_path / "set.zip.part").stat().st_size == 300_000
    shop.asked.clear()
    fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip", len(CONTENT))
    assert shop.asked == [("set.zip", "bytes=300000-")]
    assert (tmp_path / "set.zip").read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_begins_anew(shop: Shop, tmp_path: Path) -> None:
    shop.cuts = [300_000, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="broke"):
        fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip")
    shop.files["set.zip"] = CONTENT[::-1]
    fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip")
    assert (tmp_path / "set.zip").read_bytes() == CONTENT[::-1], "no mixture of two versions"


@pytest.mark.parametrize("way", ["no parts", "no tag", "weak tag"])
def test_where_nothing_can_be_continued_it_begins_anew(shop: Shop, tmp_path: Path, way: str) -> None:
    shop.ranges = way != "no parts"
    shop.tags["set.zip"] = {"no parts": '"a"', "no tag": "", "weak tag": 'W/"a"'}[way]
    shop.cuts = [100_000]
    fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip", len(CONTENT))
    assert (tmp_path / "set.zip").read_bytes() == CONTENT


def test_a_part_longer_than_the_file_is_thrown_away(shop: Shop, tmp_path: Path) -> None:
    shop.tags["set.zip"] = '"a"'
    (tmp_path / "set.zip.part").write_bytes(CONTENT + b"more")
    (tmp_path / "set.zip.part.tag").write_text('"a"')
    fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip")
    assert (tmp_path / "set.zip").read_bytes() == CONTENT


def test_another_size_and_an_endless_file_are_refused(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there has 1,024,000 bytes, the known one 99"):
        fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip", 99)
    shop.told, shop.longer = False, 50
    with pytest.raises(ConfigError, match=r"more than 1,024,000 bytes come"):
        fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip", len(CONTENT))


def test_what_nobody_told_the_size_of_has_a_limit(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "UNKNOWN_SIZE_LIMIT", 1000)
    with pytest.raises(ConfigError, match="too many for one of unknown size"):
        fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip")
    shop.told = False
    with pytest.raises(ConfigError, match=r"more than 1,000 bytes come"):
        fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip")


def test_a_redirect_is_followed_but_not_out_of_https(shop: Shop, tmp_path: Path) -> None:
    shop.moved["here.zip"] = "/set.zip"
    fetch_file(f"{shop.address}/here.zip", tmp_path / "here.zip")
    assert (tmp_path / "here.zip").read_bytes() == CONTENT
    for place in ("http://example.org/set.zip", "file:///etc/passwd", "ftp://example.org/set.zip"):
        shop.moved["away.zip"] = place
        with pytest.raises(ConfigError, match=r"refused: .* is not an https address|is not allowed"):
            fetch_file(f"{shop.address}/away.zip", tmp_path / "away.zip")
    assert not (tmp_path / "away.zip").exists()


@pytest.mark.parametrize(
    "url", ["http://example.org/a", "file:///a", "data:,a", "//a", "http://127.0.0.1.example.org/a"]
)
def test_only_https_and_this_machine_are_asked(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not an https address"):
        fetch_file(url, tmp_path / "a")


def test_a_server_elsewhere_cannot_send_us_to_this_machine() -> None:
    check_address("https://example.org/a", loopback=False)
    with pytest.raises(ConfigError, match="is not an https address"):
        check_address("http://127.0.0.1:80/a", loopback=False)


def test_a_missing_file_is_told_and_no_network_too(shop: Shop, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gone\.zip answers 404"):
        fetch_file(f"{shop.address}/gone.zip", tmp_path / "gone.zip")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1: .*refused"):
        fetch_file(f"http://127.0.0.1:{port}/set.zip", tmp_path / "set.zip")


def test_a_full_disk_is_told_before_the_first_byte(shop: Shop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", ["total", "used", "free"])  # as shutil has it
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**9, 10**9, 1000))
    with pytest.raises(ConfigError, match=r"has room for 1,000 bytes, and 1,024,000 are to come"):
        fetch_file(f"{shop.address}/set.zip", tmp_path / "set.zip")
