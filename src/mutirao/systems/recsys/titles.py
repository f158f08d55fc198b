"""Normalise titles as different catalogues write them: "Matrix, The (1999)" is "The Matrix".

A title may have several names (in brackets, after "a.k.a."), a year, an edition, and words for what is not a single
film: a season, bonus material, a double feature. `parse_title` separates them; `plain` normalises a name.
"""

import html
import re
import unicodedata
from dataclasses import dataclass

ARTICLES = "the|a|an|le|la|les|l'|un|une|il|lo|i|gli|el|los|las|der|die|das|ein|eine|o|os|as|de|het|den|det"
TRAILING = re.compile(rf"^(?P<name>.+), (?P<article>{ARTICLES})$", re.IGNORECASE)
LEADING = re.compile(r"^(the|an|a) (?=.)")
BRACKET = re.compile(r"[(\[]([^()\[\]]*)[)\]]")
YEAR = re.compile(r"[(\[]\s*((?:18|19|20)\d\d)(?:\s*[-–/]\s*(?:\d{4})?)?\s*[)\]]")
ALSO = re.compile(r"^(?:a\.?\s?k\.?\s?a\.?|also known as)[:\s]+", re.IGNORECASE)
SEGMENT = re.compile(r"\s*:\s+|\s+[-–—/]\s+|:$")
EITHER = re.compile(r",? or[:,]\s+", re.IGNORECASE)  # "Dr. Strangelove or: How I Learned to Stop Worrying"
OWNER = re.compile(r"^[^:]{2,40}?'s\s+(?=\S)")  # "Bram Stoker's Dracula"
INITIALS = re.compile(r"\b\w(?:[.*-]\w\b)+")  # "E.T.", "N-I-M-H", "M*A*S*H"
LETTERS = str.maketrans(
    {"ø": "o", "æ": "ae", "œ": "oe", "ß": "ss", "ł": "l", "đ": "d", "ð": "d", "þ": "th", "&": " and ", "+": " and "}
)

# A segment of these words alone is an edition of the same film.
EDITION = re.compile(
    r"^(?:(?:the|an?|special|collectors?|directors?|extended|extreme|limited|deluxe|ultimate|platinum|gold|masterworks|fan|"
    r"anniversary|\d+th|unrated|uncut|restored|remastered|theatrical|original|standard|wide|full|screen|widescreen|"
    r"fullscreen|english|french|italian|german|spanish|japanese|russian|hindi|dubbed|subtitled|long|short|home|viewing|"
    r"disney|silent|animated|imax|re|release|rerelease|edition|version|series|cut|movie|film|motion|picture) ?)+$"
)
# Not a single film: a season of "Fame" is not the film "Fame".
KINDS = {
    "bonus": re.compile(r"\bbonus (?:material|disc)\b|\bthe making of\b|\bbehind the scenes\b"),
    "several": re.compile(r"\b(?:double|triple) (?:feature|bill)\b|\b(?:trilogy|box(?:ed)? set)\b| / "),
    "series": re.compile(
        r"\b(?:seasons?|series|vols?\.?|volumes?|sets?|discs?|ep\.?) (?:\d|one\b|[ivx]+\b)"
        r"|\b(?:mini-?series|(?:complete|entire|tv) series|complete collection|tv version)\b|\bpilot(?: episode)?$"
    ),
    "documentary": re.compile(
        r"\(documentary\)|: unauthorized\b|\bbiography$|: live (?:in|at|from)\b|\bgreatest hits\b"
    ),
}

# fmt: off
UNITS = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve",
    "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]
ORDINALS = [
    "zeroth", "first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth", "ninth", "tenth", "eleventh",
    "twelfth", "thirteenth",
]
ROMAN = ["ii", "iii", "iv", "v", "vi", "vii", "viii", "ix", "x", "xi", "xii", "xiii", "xiv", "xv"]  # from two
# fmt: on
TENS = {"twenty": 20, "thirty": 30, "forty": 40, "fifty": 50, "sixty": 60, "seventy": 70, "eighty": 80, "ninety": 90}
SUFFIX = {1: "st", 2: "nd", 3: "rd"}
COUNTED = {"part", "pt", "chapter", "episode", "no", "number"}  # "Part II" and "II" are the same
SAME = (
    {"mister": "mr", "doctor": "dr", "saint": "st", "versus": "vs", "boulevard": "blvd", "n": "and", "deux": "2"}
    | {word: str(n) for n, word in enumerate(UNITS)}
    | {word: str(n) for word, n in TENS.items()}
    | {word: f"{n}{SUFFIX.get(n, 'th')}" for n, word in enumerate(ORDINALS)}
)


@dataclass(frozen=True)
class Title:
    """A parsed title, with normalised names."""

    names: tuple[str, ...]  # the whole title first, then alternatives
    parts: tuple[str, ...]  # before and after a colon, and without the owner
    kind: str  # "film", or one of KINDS
    edition: bool  # if so, the year may be that of the disc
    year: int  # 0: unknown


def plain(text: str) -> str:
    """A name in lower case and digits, without accents, punctuation or leading article; numerals become digits.

    >>> plain("Misérables, Les"), plain("Alien³"), plain("The Godfather, Part II"), plain("Harold & Maude")
    ('les miserables', 'alien 3', 'godfather 2', 'harold and maude')
    """
    if match := TRAILING.match(text.strip()):
        text = f"{match['article']} {match['name']}"
    # Before NFKC turns them into digits: "Alien³" is "alien 3" and not "alien3".
    text = re.sub(r"(?<=\w)(?=[²³¹])", " ", text)
    text = unicodedata.normalize("NFKC", text).casefold().translate(LETTERS)
    text = unicodedata.normalize("NFKD", text).casefold()
    text = "".join(c for c in text if not unicodedata.combining(c))
    text = INITIALS.sub(lambda found: re.sub(r"\W", "", found[0]), text)
    text = re.sub(r"['’`´]|(?<=\d),(?=\d{3})", "", text)
    words = LEADING.sub("", " ".join(re.findall(r"[^\W_]+", text))).split()
    out: list[str] = []
    for at, word in enumerate(words):
        counted = bool(out) and out[-1] in COUNTED
        value = SAME.get(word, word)
        # A first word is a name: "X-Men", "V".
        if at and word in ROMAN:
            value = str(ROMAN.index(word) + 2)
        elif word == "i" and counted:
            value = "1"
        if at and words[at - 1] in TENS and word in UNITS[1:10]:
            out[-1] = str(int(out[-1]) + int(value))
            continue
        if counted and value.isdigit():
            out.pop()
        out.append(value)
    return " ".join(out)


def parse_title(text: str, year: int = 0) -> Title:
    """Parse a title. A year in brackets counts if `year` is not given.

    >>> title = parse_title("Postino, Il (The Postman) (1994)")
    >>> title.names, title.year
    (('il postino', 'postman'), 1994)
    """
    text = html.unescape(text).strip()
    years = YEAR.findall(text)
    if years and not year:
        year = int(years[-1])
    # A bracket at the beginning is part of the name: "(500) Days of Summer".
    text = re.sub(r"^[(\[]([^()\[\]]*)[)\]]\s*(?=\S)", r"\1 ", YEAR.sub(" ", text).strip())
    small = text.casefold()
    kind = next((name for name, words in KINDS.items() if words.search(small)), "film")

    outside = " ".join(BRACKET.sub(" ", text).split()) or text
    segments = [s for s in SEGMENT.split(outside) if s.strip()]
    kept = [s for k, s in enumerate(segments) if k == 0 or not EDITION.match(plain(s))]
    whole = ": ".join(kept)
    edition = len(kept) < len(segments)
    names = [whole]
    if edition:
        names.append(outside)
    names += EITHER.split(outside)
    for inside in BRACKET.findall(text):
        also = ALSO.sub("", inside.strip())
        if EDITION.match(plain(also)):
            edition = True
        else:
            names.append(also)
            # After "a.k.a." there may be several names; elsewhere a comma belongs to the name.
            if also != inside.strip():
                names += re.split(r", |/", also)
    parts = []
    for k in range(1, len(kept)):
        parts += [": ".join(kept[:k]), ": ".join(kept[k:]), ": ".join(kept[k:] + kept[:k])]
    parts.append(OWNER.sub("", whole))
    plain_names = _plain_unique(names)
    plain_parts = tuple(part for part in _plain_unique(parts) if part not in plain_names)
    return Title(plain_names, plain_parts, kind, edition, year)


def _plain_unique(names: list[str]) -> tuple[str, ...]:
    """The different names that are left after normalising, in this order."""
    return tuple(dict.fromkeys(filter(None, map(plain, names))))
