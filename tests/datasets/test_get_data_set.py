"""Sets from a server on this machine into a folder of data sets: whole or not at all."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mutirao.cli.main import main
from mutirao.datasets import download, published
from mutirao.datasets.download import get_data_set
from mutirao.datasets.published import PUBLISHED, DataSet, File, find_copy, find_data
from mutirao.errors import ConfigError
from mutirao.systems.recsys.readers import read_ratings
from shops import Shop, open_shop, zipped

RATINGS = b"1\t1\t5\t1\n1\t2\t3\t2\n2\t1\t4\t3\n"


@pytest.fixture
def shop(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Shop]:
    """A shop that has MovieLens-100K, very small, under its name and with its right checksum."""
    monkeypatch.setattr(download, "RETRY_PAUSE", 0.0)
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path / "home"))
    files = {"ml-100k/u.data": RATINGS, "ml-100k/u.item": b"1|One (1990)|\n2|Two (1991)|\n"}
    content = zipped(tmp_path / "made.zip", files).read_bytes()
    known = PUBLISHED["ml-100k"]
    checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
    small = replace(known, files=(replace(known.files[0], size=len(content), checksum=checksum),))
    monkeypatch.setitem(published.PUBLISHED, "ml-100k", small)
    monkeypatch.setitem(download.DATA_SETS, "ml-100k", small)
    with open_shop() as shop:
        shop.files["ml-100k.zip"] = content
        yield shop


def test_a_set_is_fetched_once_and_then_found_by_its_name(shop: Shop, tmp_path: Path) -> None:
    place, new = get_data_set("ml-100k", mirror=shop.address)
    assert (place, new) == (tmp_path / "home" / "ml-100k", True)
    assert sorted(p.name for p in place.iterdir()) == ["u.data", "u.item"]
    assert [p.name for p in (tmp_path / "home" / ".downloads").iterdir()] == [], "the archive is gone"
    assert get_data_set("ml-100k", mirror=shop.address) == (place, False)
    assert len(shop.asked) == 1
    assert find_data("ml-100k") == place
    assert len(read_ratings(Path("ml-100k"))) == 3


def test_an_interrupted_command_goes_on(shop: Shop) -> None:
    shop.cuts = [20, 0, 0, 0, 0]
    with pytest.raises(ConfigError, match="run the same command again"):
        get_data_set("ml-100k", mirror=shop.address)
    assert find_copy("ml-100k") is None
    place, new = get_data_set("ml-100k", mirror=shop.address)
    assert new
    assert shop.asked[-1] == ("ml-100k.zip", "bytes=20-")
    assert (place / "u.data").read_bytes() == RATINGS


def test_wrong_bytes_are_refused_and_removed(shop: Shop, tmp_path: Path) -> None:
    shop.files["ml-100k.zip"] = bytes(len(shop.files["ml-100k.zip"]))
    with pytest.raises(ConfigError, match=r"ml-100k\.zip was removed: what 127\.0\.0\.1 sent has the checksum sha256:"):
        get_data_set("ml-100k", mirror=shop.address)
    assert not [p for p in (tmp_path / "home").rglob("*") if p.is_file()]


def test_a_first_copy_without_a_checksum_binds_the_next(shop: Shop, tmp_path: Path) -> None:
    known = DataSet("a", "b", "c", "d", folders=("free",), files=(File("https://example.org/free.txt"),))
    shop.files["free.txt"] = b"first"
    place, _ = get_data_set("free", tmp_path, shop.address, data_set=known)
    assert (place / "free.txt").read_bytes() == b"first"
    pinned = json.loads((tmp_path / "checksums.json").read_text())
    assert pinned == {"free.txt": f"sha256:{hashlib.sha256(b'first').hexdigest()}"}
    (place / "free.txt").unlink()
    place.rmdir()
    shop.files["free.txt"] = b"other"
    with pytest.raises(ConfigError, match=r"sha256:\w+, that of the first copy \(in .*checksums\.json\)"):
        get_data_set("free", tmp_path, shop.address, data_set=known)
    (tmp_path / "checksums.json").write_text("{")
    with pytest.raises(ConfigError, match=r"checksums\.json is damaged"):
        get_data_set("free", tmp_path, shop.address, data_set=known)


def test_without_a_network_the_page_and_the_place_are_named(shop: Shop, tmp_path: Path) -> None:
    shown = CliRunner().invoke(main, ["data", "get", "ml-100k", "--mirror", "http://127.0.0.1:9"])
    assert shown.exit_code == 2
    assert shown.stderr.splitlines()[-1].startswith("error: ml-100k: no answer from 127.0.0.1")
    assert "https://grouplens.org/datasets/movielens/" in shown.stderr
    assert str(tmp_path / "home" / "ml-100k") in shown.stderr
    assert not (tmp_path / "home" / ".downloads").exists()


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("netflix", r"netflix is not fetched .*: go to https://www\.kaggle\.com/.* mutirao data check netflix"),
        ("mslr", r"licence is agreed to on the page"),
        ("femnist", r"preprocess\.sh"),
        ("idx", "idx is nothing to fetch: a format for data of your own"),
        ("digits", "digits is nothing to fetch: embedded"),
        ("cifar-100", r"did you mean 'cifar100'"),
    ],
)
def test_what_is_not_fetched_is_said_in_one_line(name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        get_data_set(name, tmp_path)


def test_the_command_says_where_it_is_and_how_it_is_used(shop: Shop, tmp_path: Path) -> None:
    call = ["data", "get", "ml-100k", "--mirror", shop.address]
    shown = CliRunner().invoke(main, call)
    assert shown.exit_code == 0
    assert shown.stdout == f"ml-100k is here: {tmp_path / 'home' / 'ml-100k'}; use it with --set data=ml-100k\n"
    assert shown.stderr == "fetching ml-100k.zip\n"
    assert "is already here" in CliRunner().invoke(main, call).stdout
    other = CliRunner().invoke(main, [*call, "--to", str(tmp_path / "other"), "--json"])
    assert json.loads(other.stdout) == {
        "name": "ml-100k",
        "path": str(tmp_path / "other" / "ml-100k"),
        "fetched": True,
    }
    checked = CliRunner().invoke(main, ["data", "check", "ml-100k"])
    assert "3 ratings of 2 items by 2 users" in checked.stdout, "without a path, the copy at hand"


def test_a_folder_that_may_not_be_written_is_named(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "home").write_text("a file where the folder should be")
    shown = CliRunner().invoke(main, ["data", "get", "ml-100k", "--mirror", shop.address])
    assert shown.exit_code == 1
    assert str(tmp_path / "home") in shown.stderr.splitlines()[-1]
    assert "Traceback" not in shown.stderr
