"""The report of a run: what happened in words and figures, then the charts, then how to repeat it."""

import json
from collections import Counter, defaultdict

from mutirao.report import charts
from mutirao.report.page import Page
from mutirao.report.state import state_of
from mutirao.report.words import duration, figure, sentences
from mutirao.runs.progress import size
from mutirao.runs.reader import Record

OWN = {"curves.png", "weights.png", "participation.png"}  # drawn again on the page, where one can zoom
MOST_REASONS = 200


def page_of(record: Record) -> Page:
    """The page of a run, finished or not."""
    last = record.events[-1] if record.events else {}
    resumed = any(e.get("event") == "resumed" for e in record.events)
    state = state_of(record.path, last, resumed)
    if record.summary and not record.events:
        state = type(state)("finished")
    page = Page(f"{record.recipe}: a Mutirão run")
    when = str(record.events[0].get("time", ""))[:16].replace("T", " ") if record.events else ""
    page.heading(record.recipe, state.name, f"{record.path.name}{f', begun {when} UTC' if when else ''}")
    page.words(sentences(record, state))
    page.figures(headline(record))
    curves = charts.curves(record)
    if curves:
        page.section("How it learned")
        page.charts(curves)
    show(page, "The data", charts.partition(record))
    show(page, "Who took part", list(charts.participation(record)))
    show(page, "Groups", list(charts.groups(record)))
    members(page, record)
    show(page, "Weights and what clients reported", list(charts.weights(record)))
    show(page, "What it cost", list(charts.cost(record)))
    page.section("Failures and rejections")
    lost(page, record)
    spent = record.privacy()
    if spent or charts.privacy(record):
        show(page, "Privacy", charts.privacy(record), always=True)
        page.figures({k: (figure(v), "") for k, v in spent.items()})
    pictures(page, record)
    repeat(page, record)
    return page


def show(page: Page, title: str, specs: list[charts.Spec], always: bool = False) -> None:
    """A section, if it has anything in it."""
    if specs or always:
        page.section(title)
    if specs:
        page.charts(specs)


def headline(record: Record) -> dict[str, tuple[str, str]]:
    """The figures that people look for first."""
    out: dict[str, tuple[str, str]] = {}
    final, best = record.summary.get("final"), record.summary.get("best")
    for name in record.metrics[:8]:
        value = final.get(name) if isinstance(final, dict) else None
        if value is None:
            known = record.history.numbers(name)
            known = known[known == known]
            value = float(known[-1]) if len(known) else None
        if isinstance(value, int | float):
            top = best.get(name) if isinstance(best, dict) else None
            said = (
                f"round {record.summary.get('best_round')}: {figure(float(top))}"
                if isinstance(top, int | float)
                else ""
            )
            out[name] = (figure(float(value)), said if name == record.judge else "")
    out["rounds"] = (f"{record.rounds}", "")
    if record.population:
        out["clients"] = (f"{record.population:,}", "")
    seconds = record.summary.get("seconds")
    if isinstance(seconds, int | float):
        out["time"] = (duration(float(seconds)), "")
    both = sum(
        float(record.history.numbers(n)[~(record.history.numbers(n) != record.history.numbers(n))].sum())
        for n in ("bytes_down", "bytes_up")
    )
    if both:
        out["sent and received"] = (size(both), "")
    return out


def members(page: Page, record: Record) -> None:
    """Who is in which group."""
    found = record.groups()
    if found:
        rows = [(g, str(len(v)), ", ".join(v[:60]) + (" ..." if len(v) > 60 else "")) for g, v in found.items()]
        page.table("Groups and their clients", ("group", "clients", "who"), rows, numbers=[1])


def lost(page: Page, record: Record) -> None:
    """Failures and rejections: the chart, then each reason once with who and how often."""
    specs = charts.losses(record)
    if not specs:
        page.note("None: every client that was selected gave a usable reply.")
        return
    page.charts(specs)
    count: Counter[tuple[str, str]] = Counter()
    rounds: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    clients: defaultdict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for round, client, kind, reason in record.lost():
        count[kind, reason] += 1
        rounds[kind, reason].append(round)
        clients[kind, reason][client] = None
    rows = []
    for key, many in count.most_common(MOST_REASONS):
        who, when = list(clients[key]), rounds[key]
        named = ", ".join(who[:5]) + (f" and {len(who) - 5} more" if len(who) > 5 else "")
        first = f"round {when[0]}" + (f" to {when[-1]}" if when[-1] != when[0] else "")
        rows.append((key[0], key[1], str(many), first, named))
    page.table("Why replies are missing", ("kind", "reason", "times", "when", "who"), rows, numbers=[2])
    if len(count) > MOST_REASONS:
        page.note(f"and {len(count) - MOST_REASONS} more reasons in clients.csv")


def pictures(page: Page, record: Record) -> None:
    """What the task drew itself."""
    tables = {"partition.png": "partition.csv", "groups.png": "plane.csv"}
    own = OWN | {picture for picture, table in tables.items() if (record.path / table).is_file()}
    found = [p for p in sorted(record.path.glob("*.png")) if p.name not in own and p.is_file() and not p.is_symlink()]
    small = [p for p in found if p.stat().st_size < 400_000][:8]
    if small:
        page.section("Pictures of the task")
        page.parts.append("<div class=charts>")
        for path in small:
            page.picture(path, path.stem.replace("_", " ").capitalize())
        page.parts.append("</div>")


def repeat(page: Page, record: Record) -> None:
    """The configuration, the digest and the versions."""
    page.section("Repeat it")
    page.note("Save this as config.toml and run: mutirao run config.toml")
    if record.summary.get("digest"):
        page.note(f"The final model's digest is then {record.summary['digest']}.")
    page.code(record.text)
    made_with = record.summary.get("versions")
    if isinstance(made_with, dict):
        page.table("Versions", ("made with", "version"), [(str(k), str(v)) for k, v in made_with.items()])
    shown = {"recipe", "final", "best", "versions", "digest", "groups", "schema"}
    rest = {k: v for k, v in record.summary.items() if k not in shown}
    if rest:
        rows = [(k, v if isinstance(v, str) else json.dumps(v)[:400]) for k, v in rest.items()]
        page.table("The rest of summary.json", ("key", "value"), rows)
