"""The run on one self-contained page."""

import base64
import html
import json
from pathlib import Path

from mutirao.errors import ConfigError
from mutirao.files import Table, write_whole

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #8881; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2rem; } .soft { opacity: .75; }
.figures { display: flex; flex-wrap: wrap; gap: 1rem; padding: 0; list-style: none; }
.figures li { background: var(--soft); border-radius: .5rem; padding: .6rem 1rem; min-width: 8rem; }
.figures b { display: block; font-size: 1.5rem; }
img { max-width: 100%; background: white; border-radius: .5rem; }
table { border-collapse: collapse; }
td, th { border-bottom: 1px solid var(--line); padding: .2rem .8rem .2rem 0; text-align: left; }
pre { background: var(--soft); padding: 1rem; border-radius: .5rem; overflow-x: auto; font-size: .85rem; }
"""


def write_report(folder: Path) -> Path:
    """Write `report.html` from what the run folder holds."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder} holds no finished run: summary.json cannot be read") from error
    clients = Table(folder / "clients.csv").read()
    figures = {**{k: f"{v:.4f}" for k, v in summary["final"].items()}, "rounds": summary["rounds"]}
    figures |= {"clients": summary["clients"], "seconds": f"{summary['seconds']:.1f}"}
    lost = [r for r in clients if r.get("failure") or r.get("rejected")]
    config = (folder / "config.toml").read_text(encoding="utf-8")
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        "<meta name=viewport content='width=device-width, initial-scale=1'>",
        f"<title>{html.escape(summary['recipe'])}: a Mutirão run</title><style>{STYLE}</style>",
        f"<h1>{html.escape(summary['recipe'])}</h1>",
        f"<p class=soft>{html.escape(in_words(summary, clients))}</p>",
        "<ul class=figures>",
        *(f"<li>{html.escape(k)}<b>{html.escape(str(v))}</b></li>" for k, v in figures.items()),
        "</ul>",
        *(picture(file) for file in sorted(folder.glob("*.png"))),
        "<h2>Failures and rejections</h2>",
        table_of(lost) if lost else "<p>None: every client that was selected gave a usable reply.</p>",
        "<h2>Repeat it</h2>",
        "<p>Save this as <code>config.toml</code> and run <code>mutirao run config.toml</code>; "
        f"the final model's digest is <code>{html.escape(summary['digest'])}</code>.</p>",
        f"<pre>{html.escape(config)}</pre></html>",
    ]
    write_whole(folder / "report.html", "\n".join(parts))
    return folder / "report.html"


def in_words(summary: dict[str, object], clients: list[dict[str, str]]) -> str:
    """What happened, in a sentence or two."""
    took_part = {r["client"] for r in clients if r.get("replied") == "1"}
    never = int(str(summary["clients"])) - len(took_part)
    out = f"{len(took_part)} of {summary['clients']} clients took part in {summary['rounds']} rounds"
    return out + (f"; {never} never did." if never else ".")


def picture(path: Path) -> str:
    """A picture inside the page."""
    name = path.stem.replace("_", " ")
    content = base64.b64encode(path.read_bytes()).decode()
    title = html.escape(name.capitalize())
    return f"<h2>{title}</h2><img alt='{html.escape(name)} of this run' src='data:image/png;base64,{content}'>"


def table_of(rows: list[dict[str, str]]) -> str:
    """The first rows as a table."""
    cells = [
        f"<tr><td>{r['round']}<td>{html.escape(r['client'])}<td>{html.escape(r.get('failure') or r['rejected'])}"
        for r in rows[:100]
    ]
    more = f"<p>and {len(rows) - 100} more in clients.csv</p>" if len(rows) > 100 else ""
    return f"<table><tr><th>round<th>client<th>why{''.join(cells)}</table>{more}"
