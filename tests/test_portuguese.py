"""A page in Portuguese has the headings, commands, code, tables, pictures and links of the English one, by section."""

import re
import runpy
from collections import Counter
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from types import SimpleNamespace

import pytest
from markdown.extensions.toc import slugify

ROOT = Path(__file__).parent.parent
REQUIRED = ("README", *(f"docs/{page}" for page in ("index", "ranking", "selection", "groups", "recsys", "cytology")))
PORTUGUESE = sorted([*ROOT.glob("*.pt.md"), *ROOT.glob("docs/**/*.pt.md")])
FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[[^\[\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Section:
    """What a heading has under it that is the same in every language."""

    level: int
    title: str
    code: tuple[str, ...]  # the lines of its code, without comments
    tables: tuple[str, ...]
    pictures: tuple[str, ...]
    links: tuple[str, ...]
    words: tuple[str, ...]  # names of settings, files and commands within sentences
    items: tuple[str, ...]  # what lists and warnings there are

    def __str__(self) -> str:
        return f"'{'#' * self.level} {self.title}'"

    @property
    def shape(self) -> tuple[object, ...]:
        return self.level, self.code, self.tables, self.pictures


def english_of(page: Path) -> Path:
    return page.with_name(page.name.replace(".pt.md", ".md"))


def portuguese_of(page: Path) -> Path:
    return page.with_name(f"{page.stem}.pt{page.suffix}")


def anchors(page: Path) -> list[str]:
    titles = [title.replace("`", "") for _, title in HEADING.findall(FENCE.sub("", page.read_text(encoding="utf-8")))]
    return [slugify(title, "-") for title in titles]


def translated(link: str, page: Path) -> str:
    """Where a link of the English `page` should lead from the Portuguese one: to Portuguese if it is there."""
    path, _, anchor = link.partition("#")
    goal = page.parent / path if path else page
    if "://" in link or not goal.name.endswith((".md", ".ipynb")) or not portuguese_of(goal).exists():
        return link
    if anchor and anchor in anchors(goal):  # the heading with the same number
        here = anchors(portuguese_of(goal))
        anchor = (here + [f"heading {anchor}"] * len(anchors(goal)))[anchors(goal).index(anchor)]
    return (portuguese_of(Path(path)).as_posix() if path else "") + (f"#{anchor}" if anchor else "")


def sections(page: Path) -> list[Section]:
    """The page cut at its headings; English links are given as they should be in Portuguese."""
    text = page.read_text(encoding="utf-8")
    fenced = [(found.start(), found[2], found[3]) for found in FENCE.finditer(text)]
    prose = FENCE.sub(lambda found: "\n" * found[0].count("\n") + " " * (len(found[0]) - found[0].count("\n")), text)
    heads = list(HEADING.finditer(prose))
    made = []
    for head, end in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
        body = prose[head.end() : end]
        code = [
            line
            for start, kind, block in fenced
            if head.start() < start < end
            for line in (f"```{kind}", *(re.sub(r"(^|\s+)# .*$", "", line).rstrip() for line in block.splitlines()))
            if line
        ]
        found = LINK.findall(re.sub(r"`[^`]*`", "", body))
        links = [link for picture, link in found if not picture]
        twins = (portuguese_of(page).name, english_of(page).name)
        if not page.name.endswith(".pt.md"):
            links = [link if link in twins else translated(link, page) for link in links]
        rows = [f"a row of {line.count('|') - 1} columns" for line in body.splitlines() if line.startswith("|")]
        items = re.findall(r"^(- |\d+\. |!!! \w+)", body, re.MULTILINE)
        words = {" ".join(word.split()) for word in re.findall(r"`([^`]+)`", body)}
        made.append(
            Section(
                len(head[1]),
                head[2],
                tuple(code),
                tuple(rows),
                tuple(link for picture, link in found if picture),
                tuple(sorted(set(links) - set(twins))),
                tuple(sorted(words)),
                tuple(items),
            )
        )
    return made


def differences(english: Path) -> list[str]:
    """What the Portuguese page of `english` lacks or has too much, in sentences; none if they are in step."""
    portuguese, said = portuguese_of(english), []
    for page, other in ((english, portuguese), (portuguese, english)):
        if f"]({other.name})" not in page.read_text(encoding="utf-8")[:1500]:
            said.append(f"{page.name} does not link to {other.name} at its top")
    here, there = sections(english), sections(portuguese)
    if [part.level for part in here] != [part.level for part in there]:
        same = SequenceMatcher(None, [part.shape for part in here], [part.shape for part in there], autojunk=False)
        for kind, a, b, c, d in same.get_opcodes():
            if kind != "equal":
                ours, theirs = (", ".join(map(str, part)) or "none" for part in (here[a:b], there[c:d]))
                said.append(f"headings differ: {english.name} has {ours} where {portuguese.name} has {theirs}")
        return said
    for one, two in zip(here, there, strict=True):
        for name in ("code", "tables", "pictures", "links", "words", "items"):
            ours, theirs = Counter(getattr(one, name)), Counter(getattr(two, name))
            where = f"{portuguese.name}, '{two.title}' ('{one.title}' in {english.name}): {name}:"
            said += [f"{where} lacks {thing}" for thing in (ours - theirs).elements()]
            said += [f"{where} has {thing}" for thing in (theirs - ours).elements()]
            if ours == theirs and getattr(one, name) != getattr(two, name):
                said.append(f"{where} the same in another order")
    return said


@pytest.mark.parametrize("page", PORTUGUESE, ids=lambda page: page.name)
def test_the_page_in_portuguese_is_in_step_with_the_english_one(page: Path) -> None:
    assert english_of(page).exists(), f"{page.name} has no English page"
    assert not differences(english_of(page)), "\n".join(differences(english_of(page)))
    assert page.parent == ROOT or page.name in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_the_readme_the_start_page_and_the_five_guides_are_there_in_portuguese() -> None:
    assert not [name for name in REQUIRED if ROOT / f"{name}.pt.md" not in PORTUGUESE]


ENGLISH = """# Ranks

[Em português](ranks.pt.md)

See [selection](selection.md#why-so) and [a paper](https://example.org). Set `lr=0.1`.

## First

```console
$ mutirao run ranking   # a comment
$ mutirao list
```

## Second

- one
- two

| a | b |
|---|---|
| 1 | 2 |

![A picture](images/a.png)
"""
IN_STEP = (
    ENGLISH.replace("[Em português](ranks.pt.md)", "[In English](ranks.md)")
    .replace("# a comment", "# um comentário")
    .replace("selection.md#why-so", "selection.pt.md#por-que")
    .replace("## Second", "## Segunda")
)


@pytest.mark.parametrize(
    ("was", "becomes", "says"),
    [
        ("", "", ""),
        ("## First\n", "", "ranks.md has '# Ranks', '## First' where ranks.pt.md has '# Ranks'"),
        ("## Segunda", "### Segunda", "ranks.pt.md has '### Segunda'"),
        ("$ mutirao list\n", "", "ranks.pt.md, 'First' ('First' in ranks.md): code: lacks $ mutirao list"),
        ("run ranking", "run ranks", "lacks $ mutirao run ranking"),
        ("| 1 | 2 |\n", "", "'Segunda' ('Second' in ranks.md): tables: lacks a row of 2 columns"),
        ("images/a.png", "images/b.png", "pictures: lacks images/a.png"),
        ("selection.pt.md#por-que", "selection.md#why-so", "links: lacks selection.pt.md#por-que"),
        ("example.org", "example.com", "links: has https://example.com"),
        ("`lr=0.1`", "`lr=0.2`", "words: lacks lr=0.1"),
        ("- two\n", "", "items: lacks - "),
        ("[In English](ranks.md)", "", "ranks.pt.md does not link to ranks.md at its top"),
    ],
)
def test_a_page_that_falls_behind_is_told_what_it_lacks(was: str, becomes: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "selection.md").write_text("# Selection\n\n## Why so\n")
    (tmp_path / "selection.pt.md").write_text("# Seleção\n\n## Por quê?\n")
    (tmp_path / "ranks.md").write_text(ENGLISH)
    (tmp_path / "ranks.pt.md").write_text(IN_STEP.replace(was, becomes) if was else IN_STEP)
    said = "\n".join(differences(tmp_path / "ranks.md"))
    assert says in said
    assert bool(said) == bool(was)


def test_a_page_in_portuguese_tells_the_browser_so() -> None:
    hook = runpy.run_path(str(ROOT / "scripts" / "page_language.py"))["on_post_page"]
    for name, tongue in (("groups.pt.md", "pt-BR"), ("groups.md", "en")):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
        assert hook('<html lang="en" class="no-js">', page=page, config={}) == f'<html lang="{tongue}" class="no-js">'
