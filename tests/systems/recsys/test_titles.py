import string

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mutirao.systems.recsys.titles import parse_title, plain


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Matrix, The", "The Matrix"),
        ("Bug's Life, A", "A Bugs Life"),
        ("Misérables, Les", "Les Miserables"),
        ("Blaue Engel, Der", "Der blaue Engel"),
        ("Kjærlighetens kjøtere", "Kjaerlighetens kjotere"),
        ("Alien³", "Alien 3"),
        ("Halloween II", "Halloween 2"),
        ("The Godfather: Part II", "Godfather, Part 2, The"),
        ("Star Wars: Episode V - The Empire Strikes Back", "Star Wars: Episode 5: The Empire Strikes Back"),
        ("Nine to Five", "9 to 5"),
        ("Thirty-Two Short Films", "32 Short Films"),
        ("The Sixth Man", "The 6th Man"),
        ("Hot Shots! Part Deux", "Hot Shots! Part II"),
        ("Romeo + Juliet", "Romeo & Juliet"),
        ("Bonnie and Clyde", "Bonnie & Clyde"),
        ("E.T.", "ET"),
        ("The Secret of N-I-M-H", "Secret of NIMH, The"),
        ("M*A*S*H", "MASH"),
        ("20,000 Leagues", "20000 leagues"),
        ("Doctor Who", "Dr. Who"),
        ("Batman vs. Superman", "Batman versus Superman"),
        ("ＷＩＤＥ letters", "wide letters"),
    ],
)
def test_two_ways_to_write_a_name_become_one(one, other):
    assert plain(one) == plain(other) != ""


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Rocky", "Rocky II"),
        ("Rocky II", "Rocky III"),
        ("X-Men", "10-Men"),  # a first word is a name
        ("I, Robot", "1, Robot"),
        ("Die Hard", "Hard"),  # an article in one language is a word in another
        ("The Thin Man", "The Third Man"),
        ("First Knight", "1 Knight"),
    ],
)
def test_different_names_stay_different(one, other):
    assert plain(one) != plain(other)


@settings(deadline=None)
@given(st.text())
def test_any_text_can_be_read_and_what_comes_out_is_small_letters_and_digits(text):
    title = parse_title(text)
    for name in (*title.names, *title.parts):
        assert name == name.casefold()
        assert name == " ".join(name.split())
        assert all(c.isalnum() or c == " " or not c.isascii() for c in name)
    assert not set(title.names) & set(title.parts)


@settings(deadline=None)
@given(st.text(string.ascii_letters + " ", min_size=1).filter(lambda t: t.strip()))
def test_case_and_the_place_of_the_article_do_not_matter(name):
    assert plain(name.upper()) == plain(name.lower())
    assert plain(f"{name.strip()}, The") == plain(f"the {name.strip()}")


def test_the_year_is_taken_from_brackets_unless_it_is_known():
    assert parse_title("Heat (1995)").year == 1995
    assert parse_title("Heat (1995)", 1996).year == 1996
    assert parse_title("Heat (1995)").names == ("heat",)
    assert parse_title("2001: A Space Odyssey").year == 0
    assert parse_title("2001: A Space Odyssey (1968)").names == ("2001 a space odyssey",)
    assert parse_title("Fawlty Towers (1975-1979)").year == 1975


def test_names_in_brackets_and_after_aka_are_alternatives():
    assert parse_title("Postino, Il (The Postman) (1994)").names == ("il postino", "postman")
    assert parse_title("Seven Samurai (The Magnificent Seven) (Shichinin no samurai) (1954)").names == (
        "7 samurai",
        "magnificent 7",
        "shichinin no samurai",
    )
    assert "all i wanna do" in parse_title("Strike! (a.k.a. All I Wanna Do, The Hairy Bird) (1998)").names
    assert "dr strangelove" in parse_title("Dr. Strangelove or: How I Learned to Stop Worrying and Love the Bomb").names
    assert parse_title("(500) Days of Summer (2009)").names == ("500 days of summer",)


def test_editions_are_left_out_but_remembered():
    for text in (
        "Jaws: Special Edition",
        "Jaws (Widescreen)",
        "Jaws: 30th Anniversary Edition",
        "Jaws: Director's Cut",
    ):
        title = parse_title(text)
        assert title.names[0] == "jaws"
        assert title.edition
    assert not parse_title("Jaws: The Revenge").edition
    assert parse_title("Special Edition").names == ("special edition",)  # a whole title is never an edition


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Fame", "film"),
        ("Fame: Season 1", "series"),
        ("Emma (Miniseries)", "series"),
        ("Jaws: Bonus Material", "bonus"),
        ("The Fly / The Fly 2", "several"),
        ("Airport / Airport 1975: Double Feature", "several"),
        ("The Mummy (Documentary)", "documentary"),
        ("Queen: Live at Wembley", "documentary"),
        ("A Series of Unfortunate Events", "film"),
        ("Setting Sun", "film"),
    ],
)
def test_what_is_not_one_film_is_told_apart(text, kind):
    assert parse_title(text).kind == kind


def test_parts_stand_around_colons_and_behind_an_owner():
    assert set(parse_title("Rambo: New Blood").parts) == {"rambo", "new blood", "new blood rambo"}
    assert parse_title("National Lampoon's Animal House").parts == ("animal house",)
    assert parse_title("Heat").parts == ()


def test_nothing_but_a_year_or_punctuation_has_no_name():
    for text in ("", "(1999)", "?!", "   "):
        assert parse_title(text).names == ()
