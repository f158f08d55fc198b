"""Pages whose tables are made from runs: what stands between two marks is written anew, the rest is left alone."""

from collections.abc import Mapping
from pathlib import Path

from mutirao.errors import ConfigError
from mutirao.io import write_whole

END = "<!-- end -->"


def fill_page(page: Path, made: Mapping[str, str]) -> None:
    """Put each text between its marks, `<!-- name -->` on a line of its own and the next `<!-- end -->`."""
    text = page.read_text(encoding="utf-8")
    for name, content in made.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        _, end, after = rest.partition(END)
        if not end:
            raise ConfigError(f"{page}: no place for {name!r}; right would be <!-- {name} --> and {END}")
        text = f"{before}{mark}\n{content}\n{end}{after}"
    write_whole(page, text)
