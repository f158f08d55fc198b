"""A page that shows how readers agree, and the tiles on which they do not."""

import base64
import html
from collections.abc import Mapping
from pathlib import Path

from mutirao.datasets.folders import read_content
from mutirao.datasets.pictures import UnreadableError, picture
from mutirao.images.notice import NOTICE
from mutirao.slides.agreement import Agreement
from mutirao.slides.reading import encode

MOST = 300  # tiles on the page
THUMB = 160
STYLE = """
:root { color-scheme: light dark; --ink: #222; --page: #fff; --line: #ccc; }
@media (prefers-color-scheme: dark) { :root { --ink: #e9ebed; --page: #15181b; --line: #3a4047; } }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 78rem; margin: 2rem auto; padding: 0 1rem;
  color: var(--ink); background: var(--page); }
table { border-collapse: collapse; margin: .5rem 0 1.5rem; }
td, th { padding: .15rem .9rem; border-bottom: 1px solid var(--line); text-align: left; }
.scroll { overflow-x: auto; }
ul { list-style: none; padding: 0; display: grid; grid-template-columns: repeat(auto-fill, minmax(10rem, 1fr));
  gap: 1rem; }
li { font-size: .85rem; overflow-wrap: anywhere; } img { display: block; width: 100%; background: #fff; }
"""


def page_of(found: Agreement, paths: Mapping[str, Path], folder: str) -> str:
    """One page that needs no other file: kappas, tables, and each tile on which readers differ with what each chose."""
    differing = found.differing
    shown = "".join(tile_on_page(found, int(i), paths) for i in differing[:MOST])
    more = f"<p>{len(differing) - MOST} more are not shown.</p>" if len(differing) > MOST else ""
    tables = "".join(table_on_page(found, a, b) for a, b in found.pairs)
    told = f"{len(found.tiles):,} tiles were labelled by all, {found.partly:,} by some only"
    name = html.escape(folder)
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Agreement on {name}</title><style>{STYLE}</style></head><body><main>
<h1>Agreement on {name}</h1>
<p><strong>{html.escape(NOTICE)}</strong></p>
<p>{html.escape(found.kind)} of {html.escape(", ".join(found.readers))}: <b>{html.escape(str(found.kappa))}</b>.
The interval is drawn over {found.drawn}. {told}.</p>
{tables}
<h2>{len(differing):,} tiles on which they differ</h2>{more}<ul>{shown}</ul></main></body></html>
"""


def table_on_page(found: Agreement, a: str, b: str) -> str:
    """What two readers chose, one against the other."""
    heads = "".join(f'<th scope="col">{html.escape(c)}</th>' for c in found.classes)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(c)}</th>{"".join(f"<td>{n}</td>" for n in row)}</tr>'
        for c, row in zip(found.classes, found.table(a, b).tolist(), strict=True)
    )
    title = f"{html.escape(a)} (rows) and {html.escape(b)} (columns)"
    kappa = html.escape(str(found.pairs[a, b]))
    return (
        f"<h2>{title}</h2><p>Cohen's kappa {kappa}</p>"
        f'<div class="scroll"><table><tr><td></td>{heads}</tr>{rows}</table></div>'
    )


def tile_on_page(found: Agreement, i: int, paths: Mapping[str, Path]) -> str:
    """A tile with what each reader chose for it."""
    name = found.tiles[i]
    chosen = "<br>".join(
        f"{html.escape(reader)}: <b>{html.escape(found.classes[k])}</b>"
        for reader, k in zip(found.readers, found.given[i].tolist(), strict=True)
    )
    try:
        small = picture(read_content(paths[name]))
        small.thumbnail((THUMB, THUMB))
        source = f"data:image/jpeg;base64,{base64.b64encode(encode(small, quality=85)).decode()}"
        drawn = f'<img alt="" src="{source}">'
    except (OSError, UnreadableError):
        drawn = "<p>this tile cannot be read</p>"
    return f"<li>{drawn}{chosen}<br>{html.escape(name)}</li>"
