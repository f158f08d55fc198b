import json
import re
import subprocess
import sys
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from mutirao.cli.main import main
from mutirao.config import load_name
from mutirao.datasets import DATA_SETS, check_data_set
from mutirao.datasets.published import PUBLISHED
from mutirao.errors import ConfigError


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_set_is_described_and_its_check_exists(name):
    known = DATA_SETS[name]
    assert all([known.about, known.source, known.layout])
    assert callable(load_name(known.check))


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_set_has_a_page_terms_and_a_way_to_get_it(name):
    known = PUBLISHED[name]
    assert known.terms
    if not known.folders:
        assert known.source.startswith("embedded")
        return
    assert urlsplit(known.page).scheme == "https"
    assert bool(known.files) != bool(known.by_hand), "it is fetched, or says what to do"
    assert bool(known.files) == bool(known.size)


@pytest.mark.parametrize("name", [name for name, known in PUBLISHED.items() if known.files])
def test_what_is_fetched_comes_by_https_and_has_a_whole_checksum(name):
    for file in PUBLISHED[name].files:
        assert urlsplit(file.url).scheme == "https"
        assert re.fullmatch(r"sha256:[0-9a-f]{64}|md5:[0-9a-f]{32}", file.checksum) or name == "herlev"
        assert file.size > 0 or name == "herlev"
    assert len({file.name for file in PUBLISHED[name].files}) == len(PUBLISHED[name].files)


def test_the_list_says_source_terms_and_what_is_at_hand(tmp_path, monkeypatch):
    (tmp_path / "ml-1m").mkdir()
    monkeypatch.setenv("MUTIRAO_DATA", str(tmp_path))
    shown = CliRunner().invoke(main, ["data", "list"]).stdout
    for known in DATA_SETS.values():
        assert all(text in shown for text in (known.about, known.source, known.page, known.terms))
    assert f"here    {tmp_path / 'ml-1m'}" in shown
    assert "here    no: mutirao data get ml-100k fetches it (4.9 MB, for research" in shown
    facts = json.loads(CliRunner().invoke(main, ["data", "list", "--json"]).stdout)
    assert facts.keys() == DATA_SETS.keys()
    assert facts["ml-1m"]["here"] == str(tmp_path / "ml-1m")
    assert facts["ml-100k"]["here"] is None
    assert facts["mnist"]["fetched"]
    assert not facts["mslr"]["fetched"]


def test_the_embedded_digits_are_there():
    assert check_data_set("digits") == ["embedded in scikit-learn: 1,797 pictures of 8 x 8, 10 classes"]
    with pytest.raises(ConfigError, match="leave '/tmp' out"):
        check_data_set("digits", "/tmp")


def test_an_unknown_set_is_refused_with_a_hint():
    with pytest.raises(ConfigError, match="did you mean 'cifar10'"):
        check_data_set("cifar-10")


def test_cifar10_without_a_path_or_with_a_wrong_one_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cifar10 needs a path"):
        check_data_set("cifar10")
    with pytest.raises(ConfigError, match="does not hold CIFAR-10"):
        check_data_set("cifar10", tmp_path)


def test_listing_imports_nothing_heavy():
    code = """
import sys
import mutirao.datasets
heavy = {"torch", "sklearn", "matplotlib"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
