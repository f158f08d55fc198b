import numpy as np
import pytest
from matplotlib.image import imread
from research.expansion import (
    LEAST,
    MOST,
    Laws,
    draw_laws,
    expand,
    find_rates,
    leading,
    main,
    reduce_matrix,
    write_ratings,
)

from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.matching import match
from mutirao.systems.recsys.ratings import Ratings, gather
from mutirao.systems.recsys.readers import read_ratings


def small(users: int = 60, items: int = 40, seed: int = 0) -> Ratings:
    """Some users take much and some items are taken often; all have a title."""
    chance = rng(seed, 0, "small")
    taste = np.outer(1 / np.arange(1, users + 1) ** 0.5, 1 / np.arange(1, items + 1) ** 0.5)
    who, what = np.nonzero(chance.random((users, items)) < np.clip(2.0 * taste, 0.03, 0.95))
    known = Catalogue(
        tuple(str(k) for k in range(items)),
        tuple(f"Film {chr(97 + k // 26)}{chr(97 + k % 26)} ({1950 + k})" for k in range(items)),
        np.arange(1950, 1950 + items, dtype=np.int32),
        np.zeros(items, np.int64),
    )
    return gather(who, what, np.ones(len(who)), chance.integers(1, 10**6, len(who)), known)


def dense(ratings: Ratings) -> np.ndarray:
    matrix = np.zeros((len(ratings.users), len(ratings.catalogue)))
    matrix[ratings.owners(), ratings.items] = 1
    return matrix


def test_leading_singular_values_are_those_of_the_dense_matrix():
    ratings = small()
    u, s, v = leading(ratings, 5)
    assert s == pytest.approx(np.linalg.svd(dense(ratings), compute_uv=False)[:5])
    assert dense(ratings) @ v == pytest.approx(u * s)


@pytest.mark.parametrize("shape", [(4, 4), (6, 3), (2, 7), (1, 5), (5, 1), (1, 1)])
def test_the_small_matrix_has_the_leading_singular_values_of_the_large(shape):
    ratings = small()
    made = reduce_matrix(ratings, *shape)
    assert made.shape == shape
    values = np.linalg.svd(dense(ratings), compute_uv=False)[: min(shape)]
    assert np.linalg.svd(made, compute_uv=False) == pytest.approx(values)
    rates = find_rates(ratings, *shape)
    assert rates.min() >= LEAST
    assert rates.max() == MOST


@pytest.mark.parametrize("shuffle", ["users", "both", "none"])
def test_an_expansion_is_reproducible_and_no_user_takes_an_item_twice(shuffle):
    ratings = small()
    one, two, other = (expand(ratings, 3, 4, shuffle, seed=s) for s in (5, 5, 6))
    assert np.array_equal(one.items, two.items)
    assert np.array_equal(one.offsets, two.offsets)
    assert not np.array_equal(one.items, other.items)
    assert len(one.catalogue) == 4 * len(ratings.catalogue)
    assert len(one.users) <= 3 * len(ratings.users)
    assert one.counts().min() > 0
    assert len(set(zip(one.owners().tolist(), one.items.tolist(), strict=True))) == len(one)
    assert np.array_equal(one.catalogue.counts, np.bincount(one.items, minlength=len(one.catalogue)))
    assert (one.values == 1).all()
    starts = one.times[one.offsets[:-1]]
    assert (starts == 1).all()
    assert (np.diff(one.times)[np.diff(one.owners()) == 0] == 1).all()


def test_each_block_keeps_its_share_of_every_item_where_items_are_kept():
    ratings = small(300, 30)
    rates = find_rates(ratings, 6, 3)
    made = expand(ratings, 6, 3, "users")
    popularity = np.bincount(ratings.items, minlength=30)
    for j in range(3):
        expected = rates[:, j].sum() * popularity
        spread = np.sqrt((rates[:, j] * (1 - rates[:, j])).sum() * popularity)
        assert (np.abs(made.catalogue.counts[j * 30 : (j + 1) * 30] - expected) <= 5 * spread + 1).all()


def test_without_shuffling_every_rating_is_one_of_the_original_in_its_own_order():
    ratings = small()
    made = expand(ratings, 2, 3, "none")
    base = [ratings.items[a:b].tolist() for a, b in zip(ratings.offsets, ratings.offsets[1:], strict=False)]
    for user in range(len(made.users)):
        mine = made.items[made.offsets[user] : made.offsets[user + 1]]
        copies = mine // len(ratings.catalogue)
        assert (np.diff(copies) >= 0).all()  # block after block
        parts = [(mine[copies == j] % len(ratings.catalogue)).tolist() for j in range(3)]
        assert any(all(ordered_within(part, whole) for part in parts) for whole in base)


def ordered_within(part: list[int], whole: list[int]) -> bool:
    rest = iter(whole)
    return all(item in rest for item in part)


def test_items_that_are_kept_have_their_title_and_match_the_original_by_their_most_rated_copy():
    ratings = small()
    made = expand(ratings, 3, 2, "users")
    pairs = match(ratings.catalogue, made.catalogue).pairs
    assert len(pairs) == len(ratings.catalogue)
    counts = made.catalogue.counts.reshape(2, -1)
    for mine, theirs in pairs:
        row = ratings.catalogue.rows()[mine]
        assert made.catalogue.counts[made.catalogue.rows()[theirs]] == counts[:, row].max()
    assert set(expand(ratings, 3, 2, "both").catalogue.titles) == {""}


def test_shuffling_both_sides_parts_items_from_their_popularity():
    ratings = small(300, 40)
    popularity = np.bincount(ratings.items, minlength=40)
    for shuffle, alike in (("users", True), ("both", False)):
        made = expand(ratings, 4, 1, shuffle)
        correlation = np.corrcoef(popularity, made.catalogue.counts)[0, 1]
        assert (correlation > 0.95) == alike


def test_impossible_sizes_are_refused():
    ratings = small(8, 6)
    for users, items, message in ((0, 2, "1 or more"), (8, 2, "more than 8 users"), (2, 6, "6 items")):
        with pytest.raises(ConfigError, match=message):
            expand(ratings, users, items)


def test_the_slope_of_a_power_law_is_its_exponent():
    ranks = np.arange(1, 5001)
    laws = Laws(ranks**-0.7, 100 * ranks**-1.2, np.arange(1.0, 51.0) ** -0.5)
    figures = laws.figures()
    assert figures["activity_slope"] == pytest.approx(-0.7)
    assert figures["popularity_slope"] == pytest.approx(-1.2)
    assert figures["spectrum_slope"] == pytest.approx(-0.5)
    assert 0 < figures["activity_gini"] < figures["popularity_gini"] < 1


def test_laws_are_sorted_and_drawn(tmp_path):
    ratings = small()
    laws = Laws.of(ratings)
    assert sorted(np.bincount(ratings.items)) == sorted(laws.popularity)
    assert (np.diff(laws.activity) <= 0).all()
    draw_laws({"before": laws, "after": Laws.of(expand(ratings, 2, 2))}, tmp_path / "laws.svg")
    text = (tmp_path / "laws.svg").read_text()
    for word in ("before", "after", "activity of users", "popularity of items", "singular values"):
        assert f"<!-- {word} -->" in text


def test_the_script_writes_a_folder_that_reads_back_and_says_how_the_laws_changed(tmp_path, monkeypatch, capsys):
    write_ratings(small(), tmp_path / "small")
    out = tmp_path / "large"
    command = ["expansion", str(tmp_path / "small"), "--users", "3", "--items", "2", "--out", str(out)]
    monkeypatch.setattr("sys.argv", command)
    main()
    printed = capsys.readouterr().out
    back, made = read_ratings(out), expand(read_ratings(tmp_path / "small"), 3, 2)
    assert f"{len(made):,} ratings" in printed
    assert "popularity_gini" in printed
    assert len(back) == len(made)
    assert np.array_equal(back.offsets, made.offsets)
    for column in ("ids", "titles"):
        mine, theirs = (np.array(getattr(r.catalogue, column), object)[r.items] for r in (back, made))
        assert np.array_equal(mine, theirs)
    assert imread(out / "laws.png").shape[1] > 1000
    with pytest.raises(SystemExit):
        main()
    assert "not empty" in capsys.readouterr().err


def test_expanded_movielens_keeps_the_law_of_items_and_flattens_that_of_users(real_data):
    before = read_ratings(real_data / "ml-100k")
    figures = Laws.of(before).figures()
    after = {s: Laws.of(expand(before, 3, 3, s)).figures() for s in ("users", "both", "none")}
    for shuffle in ("users", "none"):
        assert after[shuffle]["popularity_slope"] == pytest.approx(figures["popularity_slope"], abs=0.1)
        assert after[shuffle]["popularity_gini"] == pytest.approx(figures["popularity_gini"], abs=0.06)
    assert after["none"]["activity_gini"] == pytest.approx(figures["activity_gini"], abs=0.06)
    assert after["both"]["activity_gini"] < figures["activity_gini"] - 0.05  # a user made of several is an average one
    assert after["both"]["popularity_gini"] < figures["popularity_gini"] - 0.05
    for shuffle in after:
        assert after[shuffle]["spectrum_slope"] == pytest.approx(figures["spectrum_slope"], abs=0.1)
