"""The report of a run: what happened in words and figures, then the charts, then how to repeat it."""

import json
from collections.abc import Iterable

import numpy as np

from mutirao.experiments.task import PYTHON
from mutirao.report import charts
from mutirao.report.html_page import Page, is_steady
from mutirao.report.run_state import RunState, state_in
from mutirao.report.sentences import duration, figure, label_of, privacy_sentences, sentences
from mutirao.research_notice import notice_of
from mutirao.runs.progress import size
from mutirao.runs.reader import Record

# These pictures are replaced by charts of the page, which can be zoomed.
OWN = {"curves.png", "weights.png", "participation.png"}
MOST_REASONS = 200
ENDS = 5  # clients at each end that are named where there are many


def run_page(record: Record) -> Page:
    """The page of a run, finished or not."""
    state = RunState("finished") if record.summary and not record.events else state_in(record)
    page = Page(f"{record.recipe}: a Mutirão run")
    under = record.path.name
    if record.events and (when := str(record.events[0].get("time", ""))[:16].replace("T", " ")):
        under += f", begun {when} UTC"
    page.heading(record.recipe, state.name, under)
    page.warn(notice_of(record.config))
    page.words(sentences(record, state))
    headline = run_headline(record)
    page.figures(headline)
    curves = [
        c
        for c in charts.chart_curves(record)
        if not is_steady(c) or any(s["name"] not in headline for s in c["series"])
    ]
    add_charts(page, "How it learned", curves)
    add_charts(page, "The data", charts.chart_partition(record))
    add_charts(page, "Who took part", charts.chart_participation(record))
    add_ends(page, record)
    add_charts(page, "Groups", charts.chart_groups(record))
    if groups := record.groups():
        rows = [(g, str(len(v)), ", ".join(v[:60]) + (" ..." if len(v) > 60 else "")) for g, v in groups.items()]
        page.table("Groups and their clients", ("group", "clients", "who"), rows, numbers=[1])
    add_charts(page, "Weights and what clients reported", charts.chart_weights(record))
    add_charts(page, "What it cost", charts.chart_cost(record))
    page.section("Failures and rejections")
    add_losses(page, record)
    spent = record.privacy()
    private = charts.chart_privacy(record)
    if spent or private:
        page.section("Privacy")
        for sentence in privacy_sentences(record):
            page.note(sentence)
        page.charts(private)
        page.figures({label_of(k): (figure(v), "") for k, v in spent.items()})
    add_pictures(page, record)
    add_settings(page, record)
    return page


def add_charts(page: Page, title: str, charts: Iterable[charts.Spec]) -> None:
    """A section, if it has anything in it."""
    if specs := list(charts):
        page.section(title)
        page.charts(specs)


def add_ends(page: Page, record: Record) -> None:
    """Who was selected most and least often, by name, where there are too many for a line each in the heat map."""
    names, times = record.selections()
    if len(names) <= charts.MOST_ROWS:
        return
    _, counted = record.participation()
    last = np.zeros(len(names), np.int64)
    np.maximum.at(last, record.clients.codes("client")[1], record.clients.wholes("round"))
    # `lexsort` sorts by its last key first; among equals those that have waited longest come first.
    order = np.lexsort((last, -times)).tolist()
    shown = [*order[:ENDS], *order[-ENDS:]]
    rows = [(names[i], str(times[i]), str(counted[i]), str(last[i])) for i in shown]
    rows.insert(ENDS, (f"{len(names) - 2 * ENDS:,} more", "", "", ""))
    title = "Those selected most often, and those least"
    page.table(title, ("client", "times selected", "replies that counted", "last in round"), rows, numbers=[1, 2, 3])


SPREAD = ("_clients", "_p10", "_p50", "_p90")  # of a metric at the clients: the mean and the worst come first


def run_headline(record: Record) -> dict[str, tuple[str, str]]:
    """The figures that people look for first."""
    out: dict[str, tuple[str, str]] = {}
    final = record.summary.get("final")
    best = record.summary.get("best")
    for name in [name for name in charts.distinct_metrics(record) if not name.endswith(SPREAD)][:8]:
        value = final.get(name) if isinstance(final, dict) else None
        if value is None:
            known = record.history.numbers(name)
            value = next((v for v in known[::-1].tolist() if v == v), None)
        if isinstance(value, int | float):
            remark = ""
            # Only the monitored metric has a best round; values of others are those of that round, not their best.
            if name == record.monitor and isinstance(best, dict) and isinstance(top := best.get(name), int | float):
                remark = f"best {figure(float(top))} in round\u00a0{record.summary.get('best_round')}"
            out[label_of(name)] = (figure(float(value)), remark)
    out["rounds"] = (f"{record.rounds:,}", "")
    if record.population:
        out["clients"] = (f"{record.population:,}", "")
    seconds = record.summary.get("seconds")
    if isinstance(seconds, int | float):
        out["time"] = (duration(float(seconds)), "")
    if both := sum(float(np.nansum(record.history.numbers(n))) for n in ("bytes_down", "bytes_up")):
        out["sent and received"] = (size(both), "")
    return out


def add_losses(page: Page, record: Record) -> None:
    """Failures and rejections: the chart, then each reason once with who and how often."""
    specs = charts.chart_losses(record)
    if not specs:
        page.note("None: every client that was selected gave a usable reply.")
        return
    page.charts(specs)
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for round, client, kind, reason in record.lost():
        found.setdefault((kind, reason), []).append((round, client))
    rows = []
    for (kind, reason), cases in sorted(found.items(), key=lambda item: -len(item[1]))[:MOST_REASONS]:
        first = cases[0][0]
        last = cases[-1][0]
        who = list(dict.fromkeys(client for _, client in cases))
        named = ", ".join(who[:5])
        if len(who) > 5:
            named += f" and {len(who) - 5} more"
        when = f"round {first}"
        if last != first:
            when += f" to {last}"
        rows.append((kind, reason, str(len(cases)), when, named))
    page.table("Why replies are missing", ("kind", "reason", "times", "when", "who"), rows, numbers=[2])
    if len(found) > MOST_REASONS:
        page.note(f"and {len(found) - MOST_REASONS} more reasons in clients.csv")


def add_pictures(page: Page, record: Record) -> None:
    """What the task drew itself."""
    tables = {"partition.png": "partition.csv", "groups.png": "plane.csv"}
    own = OWN | {picture for picture, table in tables.items() if (record.path / table).is_file()}
    found = [p for p in sorted(record.path.glob("*.png")) if p.name not in own and p.is_file() and not p.is_symlink()]
    if small := [p for p in found if p.stat().st_size < 400_000][:8]:
        page.section("Pictures of the task")
        page.pictures(small)


def add_settings(page: Page, record: Record) -> None:
    """The configuration, the digest and the versions."""
    page.section("Repeat it")
    if record.recipe == PYTHON:
        page.note("It was started from Python: call mutirao.run again with the same model, data and these settings.")
    else:
        page.note("Save this as config.toml and run: mutirao run config.toml")
    if record.summary.get("digest"):
        page.note(f"The final model's digest is then {record.summary['digest']}.")
    page.code("All settings: config.toml", record.text)
    made_with = record.summary.get("versions")
    if isinstance(made_with, dict):
        page.hidden_table("Versions", ("made with", "version"), [(str(k), str(v)) for k, v in made_with.items()])
    shown = {"recipe", "final", "best", "versions", "digest", "groups", "schema"}
    if rest := {k: v for k, v in record.summary.items() if k not in shown}:
        rows = [(k, v if isinstance(v, str) else json.dumps(v)[:400]) for k, v in rest.items()]
        page.hidden_table("The rest of summary.json", ("key", "value"), rows)
