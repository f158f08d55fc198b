"""Item vectors begin at random, at those of another catalogue, or at those of users who consent."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mutirao.errors import ConfigError
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.embeddings import Embeddings, save_embeddings
from mutirao.systems.recsys.fedrecon import FedRecon
from mutirao.systems.recsys.initial_items import Consent, Random, Transfer
from mutirao.systems.recsys.ratings import plant

USERS = plant(60, 50, np.random.default_rng(0))
METHOD = FedRecon(len(USERS.catalogue), 6)


def source(path: Path, ids: Any = None, titles: Any = None, biases: bool = True) -> str:
    """A file with the vector (k, k, ...) for its k-th item, counted from 1."""
    ids = USERS.catalogue.ids if ids is None else ids
    titles = tuple(f"Item {i}" for i in ids) if titles is None else titles
    catalogue = Catalogue(tuple(ids), tuple(titles), np.zeros(len(ids), np.int32), np.arange(len(ids)))
    vectors = np.repeat(np.arange(1, len(ids) + 1, dtype=np.float32)[:, None], 6, axis=1)
    save_embeddings(Embeddings(catalogue, vectors, {"biases": biases}), path / "source.safetensors")
    return str(path / "source.safetensors")


def test_random_keeps_everybody_and_repeats_itself() -> None:
    users, first, *_ = Random()(USERS, METHOD, 0)
    assert users is USERS
    np.testing.assert_array_equal(first["items"], Random()(USERS, METHOD, 0)[1]["items"])
    assert first["items"][:, 1:].std() == pytest.approx(0.1, rel=0.1)
    assert not first["items"][:, 0].any()


def test_one_catalogue_is_matched_by_id(tmp_path: Path) -> None:
    users, first, *_ = Transfer(source(tmp_path))(USERS, METHOD, 0)
    assert users is USERS
    assert first["items"][:, 3].tolist() == list(range(1, len(USERS.catalogue) + 1))


def test_another_catalogue_is_matched_by_title(tmp_path: Path) -> None:
    """Other ids for the same titles, in another order, and some that are missing."""
    titles = [*reversed(USERS.catalogue.titles[10:]), "Quite Another Thing"]
    file = source(tmp_path, [f"x{k}" for k in range(len(titles))], titles)
    _, first, *_ = Transfer(file)(USERS, METHOD, 0)
    expected = len(titles) - 1 - np.arange(len(titles) - 1)
    np.testing.assert_array_equal(first["items"][10:, 3], expected)
    assert np.abs(first["items"][:10, 3]).max() < 1


def test_a_table_of_matches_is_final(tmp_path: Path) -> None:
    file = source(tmp_path)
    table = "a_id,b_id,step,verdict\n0,5,fuzzy,yes\n1,6,fuzzy,no\nstranger,7,title,\n2,8,title,\n3,stranger,title,\n"
    (tmp_path / "matches.csv").write_text(table)
    _, first, *_ = Transfer(file, matches=str(tmp_path / "matches.csv"))(USERS, METHOD, 0)
    rows = USERS.catalogue.rows()
    carried = {i: first["items"][rows[i], 3] for i in ("0", "1", "2")}
    assert (carried["0"], carried["2"]) == (rows["5"] + 1, rows["8"] + 1)
    assert abs(carried["1"]) < 1
    assert abs(first["items"][rows["3"], 3]) < 1, "the source has no vector for its partner"


def test_a_table_of_two_other_catalogues_is_refused(tmp_path: Path) -> None:
    (tmp_path / "matches.csv").write_text("a_id,b_id,step,verdict\nx,y,title,\n")
    with pytest.raises(ConfigError, match="is it the table of two others"):
        Transfer(source(tmp_path), matches=str(tmp_path / "matches.csv"))(USERS, METHOD, 0)


def test_a_share_is_carried_over(tmp_path: Path) -> None:
    _, first, *_ = Transfer(source(tmp_path), share=0.5)(USERS, METHOD, 0)
    assert (first["items"][:, 3] >= 1).sum() == round(0.5 * len(USERS.catalogue))


def test_vectors_with_and_without_biases_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained without biases; set biases=false"):
        Transfer(source(tmp_path, biases=False))(USERS, METHOD, 0)


def test_another_dimension_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dimension 6, the model 9"):
        Transfer(source(tmp_path))(USERS, FedRecon(len(USERS.catalogue), 9), 0)


def test_those_who_consent_are_pooled_and_the_others_left() -> None:
    others, first, *_ = Consent(users=0.25, epochs=3)(USERS, METHOD, 0)
    assert len(others.users) == 45
    assert first["items"].shape == (len(USERS.catalogue), 6)
    assert first["items"][:, 0].std() > 0.01, "biases were learned"
    again, same, *_ = Consent(users=0.25, epochs=3)(USERS, METHOD, 0)
    assert again.users == others.users
    np.testing.assert_array_equal(first["items"], same["items"])


@pytest.mark.parametrize(
    ("start", "settings", "says"),
    [
        (Transfer, {}, "name a file of item vectors"),
        (Transfer, {"source": "x", "share": 1.5}, "share is 1.5"),
        (Consent, {"users": 0.0}, "users is 0.0"),
        (Consent, {"users": 1.0}, "users is 1.0"),
        (Consent, {"share": -0.5}, "share is -0.5"),
    ],
)
def test_settings_out_of_range_are_refused(start: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        start(**settings)


def test_a_share_of_what_was_pooled_is_used() -> None:
    (_, full, *_), (_, half, *_) = (Consent(users=0.5, epochs=3, share=s)(USERS, METHOD, 0) for s in (1.0, 0.5))
    same = (full["items"] == half["items"]).all(axis=1)
    assert same.mean() == pytest.approx(0.5, abs=0.02)
    popular = USERS.catalogue.counts
    assert popular[same].mean() > 1.5 * popular[~same].mean()


def test_somebody_must_be_left() -> None:
    with pytest.raises(ConfigError, match="no user is left"):
        Consent(users=0.999)(USERS, METHOD, 0)
