"""Charts of the clients: who holds what, and who took part when, how often and how evenly."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mutirao.metrics import gini
from mutirao.partitioning.heterogeneity import SAMPLES
from mutirao.report.charts import MOST_COLUMNS, Spec, line, spec
from mutirao.report.html_page import is_steady
from mutirao.report.sentences import count, in_order
from mutirao.runs.participation import lorenz as lorenz_of
from mutirao.runs.reader import Columns, Counts, Floats, Record, clean

MOST_ROWS = 100  # of a heat map: more are counted together
MOST_BARS = 120


def chart_partition(record: Record) -> list[Spec]:
    """Who has how much of what: one bar a client, stacked by class."""
    table = Columns(record.path / "partition.csv")
    names: Sequence[str]
    if len(table) and len(table.names) > 1:
        names = table.texts(table.names[0])
        classes = [*table.names[1:]]
        counts = np.nan_to_num(np.array([table.numbers(c) for c in classes]))
    else:
        (names, counts), classes = sizes_differ(record), [SAMPLES]
    if not names:
        return []
    order = sorted(range(len(names)), key=lambda i: in_order(names[i]))
    step = -(-len(order) // MOST_BARS)
    rows = order[::step]
    classed = classes != [SAMPLES]
    total = counts.sum(0)
    kinds = (counts > 0).sum(0)
    held = f"{between(total)} samples" + (f" of {between(kinds)} of {len(classes)} classes" if classed else "")
    shown = f"; {len(rows)} of {len(names):,} clients are shown" if step > 1 else ""
    every = record.population <= len(names)
    each = "Each client holds" if every else f"Each of the {len(names):,} clients that took part holds"
    about = f"{each if len(names) > 1 else 'The one client holds'} {held}{shown}."
    series = [{"name": f"class {c}" if classed else c, "values": clean(counts[i, rows])} for i, c in enumerate(classes)]
    bars = {"x": {"label": "client"}, "y": {"label": "samples", "whole": True}, "lying": True, "series": series}
    title = "Who has what" if classed else "Samples of each client"
    return [spec("bars", title, about, categories=[names[r] for r in rows], **bars)]


def sizes_differ(record: Record) -> tuple[list[str], Floats]:
    """How many samples clients said they trained on, of those that replied; a row, as of one class."""
    names, codes = record.clients.codes("client")
    told = np.nan_to_num(record.clients.numbers("n"))
    most = np.zeros(len(names))
    np.maximum.at(most, codes, told)
    if most.any():
        return (names, most[None])
    return ([], most[None])


def between(values: Any) -> str:
    """`5`, or `3 to 5`."""
    low = values.min()
    high = values.max()
    if low == high:
        return f"{low:,.0f}"
    return f"{low:,.0f} to {high:,.0f}"


def chart_participation(record: Record) -> Iterator[Spec]:
    """Who was selected: when, how often, how evenly."""
    names, counts = record.selections()
    if names:
        values = np.sort(np.concatenate([counts, np.zeros(record.population - len(counts), counts.dtype)]))
        heat = chart_heat(record, names, counts)
        yield heat
        if values[0] < values[-1]:
            yield from (chart_times(values), chart_lorenz(values))
        elif not is_steady(heat):
            yield chart_times(values)


def chart_heat(record: Record, found: Sequence[str], counts: Counts) -> Spec:
    """Clients by rounds: who was selected when."""
    order = sorted(range(len(found)), key=lambda i: in_order(found[i]))
    rounds = record.clients.numbers("round")
    keep = record.selected
    last = int(rounds[keep].max(initial=1.0))
    tall = -(-len(order) // MOST_ROWS)
    wide = -(-last // MOST_COLUMNS)
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order)) // tall
    values = np.zeros((-(-len(order) // tall), -(-last // wide)), np.intp)
    row = place[record.clients.codes("client")[1][keep]]
    np.add.at(values, (row, (rounds[keep].astype(np.intp) - 1) // wide), 1)
    ends = [(i * tall + 1, min(len(order), (i + 1) * tall)) for i in range(len(values))]
    rows = [f"{found[order[a - 1]]} – {found[order[b - 1]]}" if tall > 1 else found[order[a - 1]] for a, b in ends]
    cols = [i * wide + 1 for i in range(values.shape[1])]
    grouped = f" A row stands for {tall:,} clients." if tall > 1 else ""
    grouped += f" A column stands for {wide} rounds." if wide > 1 else ""
    every = "each in every round" if len(counts) and counts.min() == last else f"each in {between(counts)} rounds"
    about = f"{count(len(order), 'client')} over {count(last, 'round')}, {every}.{grouped}"
    cells = {"rows": rows, "cols": cols, "values": values.tolist(), "most": int(max(1, values.max())), "unit": "times"}
    axes = {"x": {"label": "round"}, "y": {"label": "client" if tall == 1 else "clients"}}
    return spec("heat", "Selected when", about, wide=True, **cells, **axes)


def chart_times(values: Any) -> Spec:
    """How many clients were selected how often."""
    most = int(values[-1])
    wide = -(-(most + 1) // 40)
    bins = np.bincount(values // wide, minlength=most // wide + 1)
    names = [str(i * wide) if wide == 1 else f"{i * wide}–{(i + 1) * wide - 1}" for i in range(len(bins))]
    about = f"From {values[0]:,} to {count(most, 'time')}; the median is {np.median(values):,g}."
    if values[0] == most:
        about = f"All were selected equally often, {count(most, 'time')}."
    series = [{"name": "clients", "values": clean(bins)}]
    axes = {"x": {"label": "times selected"}, "y": {"label": "clients", "whole": True}}
    return spec("bars", "How often clients were selected", about, categories=names, series=series, **axes)


def chart_lorenz(values: Any) -> Spec:
    """The share of all selections that the least selected share of clients has."""
    people, share = lorenz_of(values)
    keep = np.unique(np.linspace(0, len(share) - 1, min(len(share), 200)).astype(int))
    half = float(np.interp(0.5, people, share))
    even = {"name": "if all were selected alike", "x": [0, 1], "y": [0, 1], "tint": 6, "dash": "2 3", "plain": True}
    series = [line("selections", people[keep], share[keep], plain=True), even]
    about = f"The half of the clients selected least has {half:.0%} of the selections; Gini index {gini(values):.3f}."
    axes = {"x": {"label": "share of clients"}, "y": {"label": "share of selections", "zero": True}}
    return spec("lines", "Lorenz curve of selection", about, series=series, **axes)
