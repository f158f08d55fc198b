"""What is told of each data set: facts for machines, and sentences for people."""

from typing import Any

from mutirao.datasets import DATA_SETS
from mutirao.datasets.formats import FORMS
from mutirao.datasets.locations import find_copy, own_homes, say_how
from mutirao.datasets.published import PUBLISHED, DataSet


def facts_of() -> dict[str, dict[str, Any]]:
    """All that is known of each set, and where a copy lies."""
    return {
        name: {
            "about": known.about,
            "layout": known.layout,
            "source": known.source,
            "page": known.page,
            "terms": known.terms,
            "size": known.size,
            "fetched": bool(known.files),
            "form": name in FORMS,
            "here": str(found) if (found := find_copy(name)) else None,
        }
        for name, known in DATA_SETS.items()
    }


def titled() -> list[tuple[str, dict[str, DataSet]]]:
    """The two kinds of sets, with what is said above each."""
    return [
        (f"Published sets; looked for, and put, in {own_homes()[0]}", PUBLISHED),
        ("Forms, for data of your own", FORMS),
    ]


def said_of(name: str, known: DataSet) -> dict[str, str]:
    """What is said of one set, by what it is about."""
    out = {"what": known.about, "source": known.source, "page": known.page, "terms": known.terms, "size": known.size}
    out["layout"] = known.layout
    if known.folders:
        found = find_copy(name)
        out["here"] = str(found) if found else f"no: {say_how(name)}"
    return {key: text for key, text in out.items() if text}
