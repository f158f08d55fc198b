import csv
import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.cli import main
from mutirao.errors import ConfigError
from mutirao.randomness import rng
from mutirao.systems.recsys.catalogues import Catalogue
from mutirao.systems.recsys.embeddings import Embeddings, load_embeddings, save_embeddings
from mutirao.systems.recsys.matching import (
    STEPS,
    compare,
    match,
    pairs_between,
    read_pairs,
    read_verdicts,
    write_matches,
)
from mutirao.systems.recsys.readers import read_catalogue, read_ratings
from mutirao.systems.recsys.titles import parse_title

LABELS = Path(__file__).with_name("matches-labelled.csv")


def catalogue(*titles: str | tuple[str, int], counts: list[int] | None = None, prefix: str = "") -> Catalogue:
    both = [t if isinstance(t, tuple) else (t, parse_title(t).year) for t in titles]
    return Catalogue(
        tuple(f"{prefix}{k}" for k in range(len(both))),
        tuple(t for t, _ in both),
        np.array([y for _, y in both], np.int32),
        np.array(counts or [0] * len(both), np.int64),
    )


def joined(a: Catalogue, b: Catalogue, **settings: float) -> dict[str, tuple[str, str]]:
    """Title of the first catalogue -> (title of the second, step)."""
    found = match(a, b, **settings).found
    return {a.titles[p.a]: (b.titles[p.b], p.step) for p in found}


@pytest.mark.parametrize(
    ("one", "other", "step"),
    [
        ("Matrix, The (1999)", ("The Matrix", 1999), "title+year"),
        ("Misérables, Les (1998)", ("Les Miserables", 1998), "title+year"),
        ("Rocky II (1979)", ("Rocky 2", 1979), "title+year"),
        ("Spider-Man (2002)", ("Spiderman", 2002), "title+year"),
        ("Postino, Il (The Postman) (1994)", ("The Postman", 1994), "title+year"),
        ("Jaws (1975)", ("Jaws: Special Edition", 1975), "title+year"),
        ("Victor/Victoria (1982)", ("Victor / Victoria", 1982), "title+year"),
        ("Big Night (1996)", ("Big Night", 1997), "title"),
        ("Pillow Book, The (1995)", ("The Pillow Book", 1997), "title"),
        ("Adventures of Milo and Otis, The (1986)", ("The Adventures of Milo and Otis", 1989), "title"),
        ("Jimmy Hollywood (1994)", ("Jimmy Hollywood", 0), "title"),
        ("E.T. the Extra-Terrestrial (1982)", ("E.T. the Extra-Terrestrial: 20th Anniversary", 2002), "title"),
        ("Two Moon Juction (1988)", ("Two Moon Junction", 1988), "fuzzy"),
        ("Animal House (1978)", ("National Lampoon's Animal House", 1978), "fuzzy"),
        ("First Blood (1982)", ("Rambo: First Blood: Ultimate Edition", 1982), "fuzzy"),
        ("Star Trek: The Wrath of Khan (1982)", ("Star Trek II: The Wrath of Khan", 1982), "fuzzy"),
        ("Aces: Iron Eagle III (1992)", ("Iron Eagle 3: Aces", 1992), "fuzzy"),
        ("Broadway Melody, The (1929)", ("The Broadway Melody of 1929", 1929), "fuzzy"),
    ],
)
def test_the_same_film_is_found_by_its_step(one, other, step):
    assert joined(catalogue(one), catalogue(other)) == {one: (other[0], step)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Bad Boys (1995)", ("Bad Girls", 1995)),
        ("Dead Heat (1988)", ("Dead Meat", 1988)),
        ("In the Line of Duty 2 (1987)", ("In the Line of Duty 3", 1987)),
        ("Rocky (1976)", ("Rocky II", 1979)),
        ("Night Sounds: Vol. 1 (2000)", ("Night Sounds: Vol. 2", 2000)),
        ("Hamlet (1948)", ("Hamlet", 1990)),
        ("Village of the Damned (1960)", ("Village of the Damned", 1995)),
        ("Braindead (1992)", ("Brain Dead", 1990)),
        ("Calendar Girl (1993)", ("Calendar", 1993)),
        ("Dingo (1992)", ("Bingo", 1991)),
        ("Fame (1980)", ("Fame: Season 1", 1980)),
        ("Jaws (1975)", ("Jaws: Bonus Material", 1975)),
        ("Emma (1996)", ("Emma (Miniseries)", 1996)),
        ("Fly, The (1986)", ("The Fly / The Fly 2", 1986)),
        ("Pie in the Sky (1995)", ("Fire in the Sky", 1993)),
        ("Robin Hood: Men in Tights (1993)", ("Robin Hood", 1991)),
    ],
)
def test_other_films_are_not_joined(one, other):
    assert joined(catalogue(one), catalogue(other)) == {}


def test_the_closer_year_and_the_whole_title_go_first_and_no_item_is_used_twice():
    a = catalogue("Sabrina (1954)", "Sabrina (1995)", "Nikita (La Femme Nikita) (1990)")
    b = catalogue(("Sabrina", 1995), ("Sabrina", 1955), ("La Femme Nikita", 1990), ("Nikita", 1990))
    assert match(a, b).pairs == (("0", "1"), ("1", "0"), ("2", "3"))


def test_of_a_title_that_stands_twice_the_more_often_rated_item_is_taken_and_the_pair_is_doubtful():
    found = match(catalogue("Heat (1995)"), catalogue(("Heat", 1995), ("Heat", 1995), counts=[3, 9]))
    assert found.pairs == (("0", "1"),)
    assert found.found[0].doubtful
    assert found.report()["titles_twice"] == [0, 1]
    first = match(catalogue("Heat (1995)", "Heat (1995)", counts=[1, 5]), catalogue(("Heat", 1995)))
    assert first.pairs == (("1", "0"),)


def test_the_threshold_bounds_fuzzy_matches_alone():
    a, b = catalogue("Two Moon Juction (1988)", "Heat (1995)"), catalogue(("Two Moon Junction", 1988), ("Heat", 1995))
    assert len(match(a, b, threshold=90).found) == 2
    assert len(match(a, b, threshold=99).found) == 1
    for wrong in (0, -1, 101):
        with pytest.raises(ConfigError, match="threshold"):
            match(a, b, threshold=wrong)


WORDS = st.sampled_from(
    ["the", "big", "dead", "heat", "meat", "night", "of", "man", "2", "3", "ii", "part", "rambo", "blood:", "boys", "a"]
)
TITLES = st.lists(WORDS, min_size=0, max_size=5).map(" ".join)
ENTRIES = st.lists(st.tuples(TITLES, st.sampled_from([0, 1990, 1991, 1992, 1994, 2000])), min_size=1, max_size=12)


@given(ENTRIES, ENTRIES)
def test_the_result_is_that_of_comparing_everything_with_everything(left, right):
    a, b = catalogue(*left), catalogue(*right)
    found = match(a, b).found
    mine, theirs = [parse_title(*t) for t in left], [parse_title(*t) for t in right]
    free = (set(range(len(left))), set(range(len(right))))
    expected = []
    for steps in (STEPS[:2], STEPS[2:]):
        every = []
        for x in sorted(free[0]):
            for y in sorted(free[1]):
                like = compare(mine[x], theirs[y])
                if like.counts and like.step in steps:
                    every.append((STEPS.index(like.step), -like.score, like.rank, x, y))
        for step, _, _, x, y in sorted(every):
            if x in free[0] and y in free[1]:
                free[0].remove(x)
                free[1].remove(y)
                expected.append((x, y, STEPS[step]))
    assert [(p.a, p.b, p.step) for p in found] == sorted(expected)
    assert len({p.a for p in found}) == len({p.b for p in found}) == len(found)


@settings(max_examples=50, deadline=None)
@given(ENTRIES)
def test_a_catalogue_without_twice_the_same_title_is_matched_with_itself(entries):
    kinds = {(parse_title(*e).names[0], e[1]): e for e in entries if parse_title(*e).names}
    if not kinds:
        return
    a = catalogue(*kinds.values())
    assert match(a, a).pairs == tuple((i, i) for i in a.ids)


def test_empty_catalogues_are_refused_and_empty_titles_match_nothing():
    empty = catalogue()
    with pytest.raises(ConfigError, match="first catalogue is empty"):
        match(empty, catalogue("Heat"))
    with pytest.raises(ConfigError, match="second catalogue is empty"):
        match(catalogue("Heat"), empty)
    assert match(catalogue("", "?"), catalogue("", "?")).found == ()


def test_a_multitude_of_like_titles_is_matched_without_comparing_all_pairs_closely():
    a = catalogue(*[("Untitled", 2000)] * 1000, *[(f"Episode {k} of the long story", 2000) for k in range(1000)])
    b = catalogue(("Untitled", 2000), *[(f"Episode {k} of the long story", 2000) for k in range(2, 1001)])
    found = match(a, b).found
    assert all(a.titles[p.a] == b.titles[p.b] for p in found)
    assert sum(a.titles[p.a] != "Untitled" for p in found) == 998
    assert {(y, x) for x, y in match(b, a).pairs} >= {(a.ids[p.a], b.ids[p.b]) for p in found if p.a >= 1000}


def test_coverage_is_reported_by_step_and_by_what_is_rated():
    a = catalogue("Heat (1995)", "Big Night (1996)", "Two Moon Juction (1988)", "Alone (2001)", counts=[6, 2, 0, 2])
    b = catalogue(("Heat", 1995), ("Big Night", 1997), ("Two Moon Junction", 1988))
    report = match(a, b).report()
    assert report["steps"] == {"title+year": 1, "title": 1, "fuzzy": 1}
    assert (report["matched"], report["share"]) == (3, 0.75)
    assert (report["rated"], report["rated_matched"], report["ratings_share"]) == (3, 2, 0.8)


# the review loop


def films() -> tuple[Catalogue, Catalogue]:
    a = catalogue("Heat (1995)", "Hamlet (1948)", "Reckless (1995)", "Vacation (1983)", prefix="a")
    b = catalogue(
        ("Heat", 1995), ("Hamlet", 1990), ("Reckless", 1996), ("National Lampoon's Vacation", 1983), prefix="b"
    )
    return a, b


def edited(path: Path, changes: dict[tuple[str, str], str]) -> None:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["verdict"] = changes.get((row["a_id"], row["b_id"]), row["verdict"])
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)


def test_a_person_corrects_the_table_and_the_verdicts_last(tmp_path):
    a, b = films()
    table = tmp_path / "matches.csv"
    first = match(a, b)
    write_matches(first, table)
    assert read_pairs(table) == tuple(sorted(first.pairs, key=lambda p: read_pairs(table).index(p)))
    assert set(first.pairs) == {("a0", "b0"), ("a2", "b2"), ("a3", "b3")}
    assert read_verdicts(table) == {}
    rows = list(csv.DictReader(table.read_text().splitlines()))
    assert [r["doubtful"] for r in rows if r["step"] != "none"] == ["yes", "", ""]  # what to look at stands first
    assert [(r["a_id"], r["b_id"]) for r in rows if r["step"] == "none"] == [("a1", "b1")]

    edited(table, {("a2", "b2"): "no", ("a1", "b1"): "YES "})
    assert set(read_pairs(table)) == {("a0", "b0"), ("a1", "b1"), ("a3", "b3")}
    for _ in range(2):  # and again, from the table written after the review
        again = match(a, b, verdicts=read_verdicts(table))
        assert set(again.pairs) == {("a0", "b0"), ("a1", "b1"), ("a3", "b3")}
        assert again.report()["steps"]["review"] == 1
        write_matches(again, table)
        assert read_verdicts(table) == {("a1", "b1"): True, ("a2", "b2"): False}


def test_a_verdict_may_join_what_the_matcher_gave_to_another(tmp_path):
    a, b = films()
    found = match(a, b, verdicts={("a1", "b0"): True})
    assert ("a1", "b0") in found.pairs
    assert all(x != "a0" for x, _ in found.pairs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a_id,b_id,step\n", "line 1: column 'verdict' is missing"),
        ("", "line 1: column 'a_id' is missing"),
        ("a_id,b_id,step,verdict\na0,b0,title,maybe\n", "line 2: verdict is 'maybe'; expected yes, no"),
        ("a_id,b_id,step,verdict\n,b0,title,yes\n", "line 2: a_id or b_id is missing"),
        ("a_id,b_id,step,verdict\na0,b0,title,\na0,b0,title,no\n", "line 3: the pair 'a0', 'b0' is in line 2"),
        ("a_id,b_id,step,verdict\na9,b0,title,yes\n", "the review names item 'a9', which the first"),
        ("a_id,b_id,step,verdict\na0,b9,title,no\n", "the review names item 'b9', which the second"),
        ("a_id,b_id,step,verdict\na0,b0,,yes\na0,b1,,yes\n", "item 'a0' of the first catalogue is said to be both"),
        ("a_id,b_id,step,verdict\na0,b0,,yes\na1,b0,,yes\n", "item 'b0' of the second catalogue is said to be both"),
    ],
)
def test_a_wrong_review_is_refused_with_its_place(tmp_path, text, message):
    table = tmp_path / "review.csv"
    table.write_text(text)
    a, b = films()
    with pytest.raises(ConfigError, match=message):
        match(a, b, verdicts=read_verdicts(table))


def test_a_table_from_another_spreadsheet_is_read(tmp_path):
    table = tmp_path / "review.csv"
    table.write_bytes("\ufeffa_id;b_id;step;verdict\r\na1;b1;none;Yes\r\n;;;\r\n".encode())
    assert read_verdicts(table) == {("a1", "b1"): True}
    table.write_bytes(b"a_id,b_id,step,verdict\na0,b0,title,\na0,b1,title,\n")
    with pytest.raises(ConfigError, match="'a0' of the first catalogue is in two pairs"):
        read_pairs(table)
    table.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_pairs(table)


# the commands


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(main, ["catalogue", *map(str, words)])


def on_disk(folder: Path) -> tuple[Path, Path]:
    files = []
    for c, name in zip(films(), ("a.csv", "b.csv"), strict=True):
        rows = [f'{i},"{t}",{y or ""}' for i, t, y in zip(c.ids, c.titles, c.years.tolist(), strict=True)]
        (folder / name).write_text("\n".join(["id,title,year", *rows]) + "\n")
        files.append(folder / name)
    return files[0], files[1]


def test_match_writes_a_table_and_a_report_and_takes_the_table_back(tmp_path):
    a, b = on_disk(tmp_path)
    table = tmp_path / "m.csv"
    done = run("match", a, b, "--out", table)
    assert done.exit_code == 0
    assert "3 of 4 items matched (75.0%)" in done.output
    edited(table, {("a1", "b1"): "yes"})
    refused = run("match", a, b, "--out", table)
    assert refused.exit_code == 2
    assert "may hold verdicts" in refused.output
    done = run("match", a, b, "--review", table, "--out", table, "--json")
    assert json.loads(done.stdout)["matched"] == 4
    assert read_verdicts(table) == {("a1", "b1"): True}


def test_match_says_in_a_line_what_is_wrong(tmp_path):
    a, _ = on_disk(tmp_path)
    (tmp_path / "empty.csv").write_text("id,title,year\n")
    (tmp_path / "columns.csv").write_text("name,year\n1,2\n")
    for other, message in (
        ("empty.csv", "is an empty catalogue"),
        ("columns.csv", "expected id,title,year"),
        ("nowhere", "holds no catalogue"),
    ):
        done = run("match", a, tmp_path / other, "--out", tmp_path / "m.csv")
        assert done.exit_code == 2
        assert message in done.output
        assert len(done.output.splitlines()) == 1
    assert not (tmp_path / "m.csv").exists()


@pytest.mark.parametrize(("options", "carried"), [([], 3), (["--share", "0.34"], 1), (["--share", "0"], 0)])
def test_transfer_carries_a_share_of_the_vectors(tmp_path, options, carried):
    a, b = on_disk(tmp_path)
    theirs = read_catalogue(b)
    vectors = rng(0, 0, "vectors").normal(3, 1, (len(theirs), 5)).astype(np.float32)
    save_embeddings(Embeddings(theirs, vectors, {"how": "test"}), tmp_path / "source.safetensors")
    run("match", a, b, "--out", tmp_path / "m.csv")
    files = [tmp_path / "given.safetensors", tmp_path / "anew.safetensors"]
    for file, extra in zip(files, (["--matches", tmp_path / "m.csv"], []), strict=True):
        done = run("transfer", a, tmp_path / "source.safetensors", *extra, *options, "--out", file, "--json")
        assert json.loads(done.stdout)["carried_over"] == carried
        made = load_embeddings(file)
        same = (made.vectors[:, None] == vectors[None]).all(-1)
        assert same.sum() == carried
        assert made.card["source"] == {"how": "test"}
        assert made.catalogue.ids == read_catalogue(a).ids
        assert np.abs(made.vectors[~same.any(1)]).max() < 1  # the others begin near nought


def test_pairs_of_items_without_a_vector_are_passed_over(tmp_path, caplog):
    a, b = films()
    write_matches(match(a, b), tmp_path / "m.csv")
    some = b.take(np.array([0, 1]))
    assert pairs_between(tmp_path / "m.csv", a, some) == (("a0", "b0"),)
    assert "2 of 3 pairs are of items that one of the catalogues lacks" in caplog.text


def test_pretrained_vectors_of_one_catalogue_begin_another(tmp_path):
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "movies.csv").write_text('movieId,title\n7,"Heat (1995)"\n8,"Vacation (1983)"\n9,Else\n')
    rows = [f"{u},{i},{1 + (u + i) % 5}" for u in range(1, 9) for i in (7, 8, 9)]
    (tmp_path / "source" / "ratings.csv").write_text("\n".join(["userId,movieId,rating", *rows, ""]))
    source = tmp_path / "source.safetensors"
    done = run("pretrain", tmp_path / "source", "--dimension", "3", "--epochs", "2", "--out", source, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["ratings"] == 24
    a, _ = on_disk(tmp_path)
    assert run("transfer", a, source, "--out", tmp_path / "first.safetensors").exit_code == 0
    made, trained = load_embeddings(tmp_path / "first.safetensors"), load_embeddings(source)
    assert np.array_equal(made.vectors[0], trained.vectors[0])
    assert run("pretrain", tmp_path / "source", "--dimension", "0", "--out", source).exit_code == 2


def test_transfer_says_in_a_line_what_is_wrong(tmp_path):
    a, b = on_disk(tmp_path)
    theirs = read_catalogue(b)
    save_embeddings(Embeddings(theirs, np.ones((len(theirs), 2), np.float32)), tmp_path / "source.safetensors")
    (tmp_path / "m.csv").write_text("a_id,b_id,step,verdict\na9,b0,title,\n")
    for extra, message in (
        (["--matches", tmp_path / "m.csv"], "no pair of items that both catalogues have"),
        (["--share", "1.5"], "share"),
        (["--matches", tmp_path / "none.csv"], "cannot read"),
    ):
        done = run("transfer", a, tmp_path / "source.safetensors", *extra, "--out", tmp_path / "x.safetensors")
        assert done.exit_code == 2
        assert message in done.output
    assert not (tmp_path / "x.safetensors").exists()


# real catalogues


def labelled() -> list[dict[str, str]]:
    with LABELS.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_labels_are_ids_and_verdicts_of_all_strata():
    rows = labelled()
    assert len({r["movielens"] for r in rows}) >= 400
    assert all(r["movielens"].isdigit() and (r["netflix"].isdigit() or r["verdict"] == "none") for r in rows)
    for sample in ("1", "2"):
        assert {r["stratum"] for r in rows if r["sample"] == sample} == {*STEPS, "none"}


@pytest.mark.slow
def test_netflix_and_movielens_are_matched_widely_and_rightly(real_data):
    a, b = read_ratings(real_data / "ml-1m").catalogue, read_catalogue(real_data / "netflix")
    matches = match(a, b)
    assert len(a) == 3706
    assert matches.report()["share"] >= 0.73
    got = dict(matches.pairs)
    size = {s: sum(p.step == s for p in matches.found) for s in STEPS} | {"none": len(a) - len(matches.found)}
    for sample in ({"1"}, {"2"}, {"1", "2"}):
        rows = [r for r in labelled() if r["sample"] in sample]
        truth = {r["movielens"]: r["netflix"] if r["verdict"] == "yes" else "" for r in rows if r["verdict"] != "no"}
        stratum = {r["movielens"]: r["stratum"] for r in rows}
        right = [m for m, n in truth.items() if n and got.get(m) == n]
        wrong = [m for m, n in truth.items() if m in got and got[m] != n]
        assert len(right) / (len(right) + len(wrong)) >= 0.97
        drawn = {s: sum(stratum[m] == s for m in truth) for s in size}
        missed = [m for m, n in truth.items() if n and got.get(m) != n]
        whole = sum(size[stratum[m]] / drawn[stratum[m]] for m in right)  # each stands for its stratum
        lost = sum(size[stratum[m]] / drawn[stratum[m]] for m in missed)
        assert whole / (whole + lost) >= 0.96
