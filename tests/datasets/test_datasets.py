import subprocess
import sys

import pytest

from mutirao.config import load_name
from mutirao.datasets import DATA_SETS, check_data_set
from mutirao.errors import ConfigError


@pytest.mark.parametrize("name", DATA_SETS)
def test_every_set_is_described_and_its_check_exists(name):
    known = DATA_SETS[name]
    assert all([known.about, known.source, known.layout])
    assert callable(load_name(known.check))


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
