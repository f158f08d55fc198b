"""The charts of a run as plain tables: what `charts.js` draws, with a sentence each for those who cannot see it."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mutirao.metrics import Direction, direction_of, gini
from mutirao.report.words import figure
from mutirao.runs.participation import lorenz as lorenz_of
from mutirao.runs.progress import size
from mutirao.runs.reader import Columns, Counts, Floats, Record, clean, json_of
from mutirao.runs.schema import CLIENTS, SIMULATED

Spec = dict[str, Any]
MOST_ROWS, MOST_COLUMNS = 100, 200  # of a heat map: more are counted together
MOST_DOTS = 4000  # of a scatter: more could not be told apart, and would only make the page heavy
MOST_BARS = 120
ROUND = {"label": "round", "whole": True}
AT_CLIENTS = " at the clients"


def spec(kind: str, title: str, about: str, **rest: Any) -> Spec:
    """One chart."""
    return {"kind": kind, "title": title, "about": about, **rest}


def line(name: str, x: Floats, y: Floats, **rest: Any) -> dict[str, Any]:
    """One curve, where it has values."""
    keep = ~np.isnan(y)
    extra = {k: clean(v[keep]) if isinstance(v, np.ndarray) else v for k, v in rest.items()}
    return {"name": name, "x": clean(x[keep]), "y": clean(y[keep]), **extra}


def family(metric: str) -> str:
    """Curves of one family share a chart: `loss` and `train_loss`, `ndcg@1` and `ndcg@5`."""
    name = metric.removeprefix("train_").partition("@")[0]
    stem, _, last = name.removesuffix("_decile").rpartition("_")
    at_clients = stem and last in ("worst", "p10", "p50", "p90", "mean", "own")
    return f"{stem}{AT_CLIENTS}" if at_clients else name


def chart_curves(record: Record) -> list[Spec]:
    """Metrics by round, one chart a family, the judged one first."""
    trained = [n for n in record.history.names if n.startswith("train_")]
    chosen = [m for m in record.metrics if not m.endswith("_clients") and not m.startswith("epsilon")]
    families: dict[str, list[str]] = {}
    for name in [*chosen, *trained]:
        families.setdefault(family(name), []).append(name)
    rounds = record.history.numbers("round")
    made = []
    for title, names in families.items():
        series, said = [], []
        for i, name in enumerate(names):
            values = record.history.numbers(name)
            if np.isnan(values).all():
                continue
            label = f"{name.removeprefix('train_')}, in training" if name.startswith("train_") else name
            series.append(line(label, rounds, values, tint=i, dash="6 3" if name.startswith("train_") else ""))
            said.append(trend(label, series[-1]["y"], record.direction(name)))
        once = title.endswith(AT_CLIENTS) and all(len(curve["x"]) == 1 for curve in series)  # the table has that
        if series and not once:
            made.append(spec("lines", title, f"{'; '.join(said[:3])}.", x=ROUND, y={"label": ""}, series=series))
    return made


def trend(name: str, values: Sequence[float], way: Direction | None) -> str:
    """A curve in words, with its best value if it is known which way is better."""
    if len(values) < 2:
        return f"{name} {figure(values[0])}"
    best = f", best {figure((min if way == 'lower' else max)(values))}" if way else ""
    return f"{name} from {figure(values[0])} to {figure(values[-1])}{best}"


def chart_partition(record: Record) -> list[Spec]:
    """Who has how much of what: one bar a client, stacked by class."""
    table = Columns(record.path / "partition.csv")
    if not len(table) or len(table.names) < 2:
        return []
    names, classes = table.texts(table.names[0]), table.names[1:]
    step = -(-len(table) // MOST_BARS)
    rows = list(range(0, len(table), step))
    counts = np.nan_to_num(np.array([table.numbers(c) for c in classes]))
    total = counts.sum(0)
    kinds = (counts > 0).sum(0)
    shown = f"; {len(rows)} of {len(table):,} clients are shown" if step > 1 else ""
    about = (
        f"Clients hold {total.min():.0f} to {total.max():.0f} samples of {kinds.min()} to {kinds.max()} "
        f"of {len(classes)} classes{shown}."
    )
    series = [{"name": f"class {c}", "values": clean(counts[i, rows])} for i, c in enumerate(classes)]
    bars = {"x": {"label": "client"}, "y": {"label": "samples", "whole": True}, "lying": True, "series": series}
    return [spec("bars", "Who has what", about, categories=[names[r] for r in rows], **bars)]


def chart_participation(record: Record) -> Iterator[Spec]:
    """Who was selected: when, how often, how evenly."""
    names, counts = record.selections()
    if names:
        values = np.sort(np.concatenate([counts, np.zeros(record.population - len(counts), counts.dtype)]))
        yield from (chart_heat(record, names, counts), chart_times(values), chart_lorenz(values))


def chart_heat(record: Record, found: Sequence[str], counts: Counts) -> Spec:
    """Clients by rounds: who was selected when."""
    order = sorted(range(len(found)), key=found.__getitem__)
    order = [order[i] for i in np.argsort(-counts[order], kind="stable").tolist()]
    rounds = record.clients.numbers("round")
    keep = rounds >= 1
    last = int(rounds[keep].max(initial=1.0))
    tall, wide = -(-len(order) // MOST_ROWS), -(-last // MOST_COLUMNS)
    place = np.empty(len(order), np.intp)
    place[order] = np.arange(len(order)) // tall
    values = np.zeros((-(-len(order) // tall), -(-last // wide)), np.intp)
    row = place[record.clients.codes("client")[1][keep]]
    np.add.at(values, (row, (rounds[keep].astype(np.intp) - 1) // wide), 1)
    ends = [(i * tall + 1, min(len(order), (i + 1) * tall)) for i in range(len(values))]
    rows = [f"{a:,}–{b:,}" for a, b in ends] if tall > 1 else [found[i] for i in order]
    cols = [i * wide + 1 for i in range(values.shape[1])]
    grouped = f" A row stands for {tall:,} clients." if tall > 1 else ""
    grouped += f" A column stands for {wide} rounds." if wide > 1 else ""
    about = f"{len(order):,} clients, the busiest on top, over {last} rounds.{grouped}"
    cells = {"rows": rows, "cols": cols, "values": values.tolist(), "most": int(max(1, values.max())), "unit": "times"}
    axes = {"x": {"label": "round"}, "y": {"label": "client" if tall == 1 else "clients, busiest first"}}
    return spec("heat", "Selected when", about, **cells, **axes)


def chart_times(values: Any) -> Spec:
    """How many clients were selected how often."""
    most = int(values[-1])
    wide = -(-(most + 1) // 40)
    bins = np.bincount(values // wide, minlength=most // wide + 1)
    names = [str(i * wide) if wide == 1 else f"{i * wide}–{(i + 1) * wide - 1}" for i in range(len(bins))]
    about = f"From {values[0]} to {most} times; the middle client {np.median(values):g} times."
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
    about = f"The half of the clients selected least has {half:.0%} of the selections; Gini {gini(values):.3f}."
    axes = {"x": {"label": "share of clients"}, "y": {"label": "share of selections", "zero": True}}
    return spec("lines", "Lorenz curve of selection", about, series=series, **axes)


def chart_weights(record: Record) -> Iterator[Spec]:
    """Weights of clients by round, coloured by risk where there is one, and the method's own figures."""
    table = record.clients
    rounds, weight = table.numbers("round"), table.numbers("weight")
    used = weight > 0
    if used.any() and "risk" in table:
        risk = table.numbers("risk")
        rows = np.flatnonzero(~np.isnan(risk) & ~np.isnan(weight))
        rows = rows[:: max(1, -(-len(rows) // MOST_DOTS))]
        if len(rows):
            most = float(max(1e-9, np.abs(risk[rows]).max()))
            names, who = table.codes("client")
            series = {"name": "weights", "x": clean(rounds[rows]), "y": clean(weight[rows]), "shade": clean(risk[rows])}
            series["labels"] = [names[i] for i in who[rows].tolist()]
            about = f"Risk from {figure(risk[rows].min())} to {figure(risk[rows].max())}."
            axes = {"x": ROUND, "y": {"label": "weight", "zero": True}, "shade": {"label": "risk", "most": most}}
            yield spec("scatter", "Weight of each client, coloured by its risk", about, series=[series], **axes)
    if used.any():
        yield chart_spread("weight", rounds[used], weight[used], "Weights of the clients in a round")
    for name in table.names:
        if name in CLIENTS - SIMULATED or np.isnan(values := table.numbers(name)).all():
            continue
        keep = ~np.isnan(values)
        yield chart_spread(name, rounds[keep], values[keep], f"{name}, over the clients of a round")
    if used.any() and "age" in table:
        yield chart_spread("age", rounds[used], table.numbers("age")[used], "Rounds since a client was last selected")


def chart_spread(name: str, rounds: Floats, values: Floats, title: str) -> Spec:
    """The middle and the outer tenths of a client figure, by round."""
    order = np.lexsort((values, rounds))
    at, starts, counts = np.unique(rounds[order], return_index=True, return_counts=True)
    low, middle, high = (quantile(values[order], starts, counts, q) for q in (0.1, 0.5, 0.9))
    ends = f"{figure(middle[0])} to {figure(middle[-1])}"
    about = f"The middle client's {name} goes from {ends}; eight in ten are in the band."
    return spec("lines", title, about, x=ROUND, y={"label": name}, series=[line(name, at, middle, lo=low, hi=high)])


def quantile(ordered: Floats, starts: Any, counts: Any, q: float) -> Floats:
    """The quantile of each stretch of sorted values, between two of them where it falls there."""
    place = q * (counts - 1)
    below = np.floor(place).astype(np.intp)
    above = np.minimum(below + 1, counts - 1)
    return np.asarray(ordered[starts + below] + (place - below) * (ordered[starts + above] - ordered[starts + below]))


def chart_groups(record: Record) -> Iterator[Spec]:
    """Groups of clients in the plane, and how each fares."""
    found = record.groups()
    if not found:
        return
    plane = Columns(record.path / "plane.csv")
    if len(plane):
        of = {c: g for g, members in found.items() for c in members}
        names, x, y = plane.texts("client"), plane.numbers("x"), plane.numbers("y")
        series = []
        for group in sorted({of.get(c, "none") for c in names}):
            rows = [i for i, c in enumerate(names) if of.get(c, "none") == group]
            labels = [names[i] for i in rows]
            series.append({"name": group, "x": clean(x[rows]), "y": clean(y[rows]), "labels": labels})
        about = f"{len(names)} clients by what they sent, in {len(found)} groups; near is alike."
        axes = {"x": {"label": "first direction"}, "y": {"label": "second direction"}, "big": True}
        yield spec("scatter", "Clients in the plane", about, series=series, **axes)
    sizes = [{"name": "clients", "values": [len(v) for v in found.values()]}]
    axes = {"x": {"label": "group"}, "y": {"label": "clients", "whole": True}}
    about = "; ".join(f"group {g}: {len(v)}" for g, v in list(found.items())[:12])
    yield spec("bars", "Clients of each group", about, categories=list(found), series=sizes, **axes)
    yield from chart_scores(record)
    yield from chart_training(record.clients)


def chart_scores(record: Record) -> Iterator[Spec]:
    """How each group's model does, by round and the metric that judges, as a run with groups writes it."""
    scores, metric = json_of(record.path / "groups.json").get("scores"), record.judge or "accuracy"
    series = []
    for i, (group, rows) in enumerate(scores.items() if isinstance(scores, dict) else ()):
        known = [r for r in rows if isinstance(r, dict) and isinstance(r.get(metric), int | float)]
        rounds, values = (np.array([float(r.get(k, 0)) for r in known]) for k in ("round", metric))
        if known:
            series.append(line(f"group {group}", rounds, values, tint=i))
    if series:
        about = "; ".join(trend(s["name"], s["y"], record.direction(metric)) for s in series[:6]) + "."
        yield spec("lines", f"{metric} of each group", about, x=ROUND, y={"label": metric}, series=series)


def chart_training(table: Columns) -> Iterator[Spec]:
    """What clients reported in training, as the mean of their group."""
    if "group" not in table:
        return
    (groups, codes), rounds = table.codes("group"), table.numbers("round")
    for name in ("accuracy", "loss"):
        values = table.numbers(name)
        if np.isnan(values).all():
            continue
        series = []
        for i, group in enumerate(sorted({*groups} - {""})):
            rows = (codes == groups.index(group)) & ~np.isnan(values)
            at, place = np.unique(rounds[rows], return_inverse=True)
            means = np.bincount(place, values[rows]) / np.bincount(place)
            if len(at):
                series.append(line(f"group {group}", at, means, tint=i))
        if series:
            about = "; ".join(trend(s["name"], s["y"], direction_of(name)) for s in series[:3]) + "."
            yield spec("lines", f"{name} in training, by group", about, x=ROUND, y={"label": name}, series=series)


def chart_cost(record: Record) -> Iterator[Spec]:
    """Bytes and seconds of the rounds."""
    history = record.history
    rounds = history.numbers("round")
    if not len(history):
        return
    down, up = (np.cumsum(np.nan_to_num(history.numbers(n))) for n in ("bytes_down", "bytes_up"))
    series = [
        line("to the clients", rounds, down, plain=True),
        line("from the clients", rounds, up, plain=True, dash="6 3"),
    ]
    about = f"In all {size(down[-1])} to the clients and {size(up[-1])} back."
    axes = {"x": ROUND, "y": {"label": "so far", "unit": "bytes", "zero": True}}
    yield spec("lines", "Bytes so far", about, series=series, **axes)
    names = {"seconds": "seconds", "probe_seconds": "of these, probing"}
    series = [line(v, rounds, history.numbers(k), plain=True) for k, v in names.items() if k in history]
    seconds = history.numbers("seconds")
    known = seconds[~np.isnan(seconds)]
    if len(known):
        about = f"The middle round took {figure(np.median(known))} s, the longest {figure(known.max())} s."
        axes = {"x": ROUND, "y": {"label": "seconds", "zero": True}}
        yield spec("lines", "Seconds of each round", about, series=series, **axes)
    judge, passed = history.numbers(record.judge), np.cumsum(np.nan_to_num(history.numbers("sim_seconds")))
    if passed.any() and not np.isnan(judge).all():
        said = trend(record.judge, line("", rounds, judge)["y"], record.direction(record.judge))
        about = f"{said} after {figure(float(passed[-1]))} simulated seconds."
        axes = {"x": {"label": "simulated seconds"}, "y": {"label": record.judge}}
        series = [line(record.judge, passed, judge)]
        yield spec("lines", f"{record.judge} by simulated time", about, series=series, **axes)


def chart_losses(record: Record) -> list[Spec]:
    """Failures and rejections by round and kind."""
    lost = list(record.lost())
    if not lost:
        return []
    kinds = [k for k, _ in Counter(kind for _, _, kind, _ in lost).most_common(6)]
    last = max(record.rounds, *(int(r) for r, *_ in lost if r.isdigit()), 1)
    wide = -(-last // MOST_COLUMNS)
    counts = {k: np.zeros(-(-last // wide), int) for k in [*kinds, "other"]}
    for round, _, kind, _ in lost:
        if round.isdigit() and int(round) >= 1:
            counts[kind if kind in kinds else "other"][(int(round) - 1) // wide] += 1
    series = [{"name": k, "values": clean(v)} for k, v in counts.items() if v.any()]
    names = [i * wide + 1 for i in range(-(-last // wide))]
    kinds_of = ", ".join(f"{k} {int(v.sum())}" for k, v in counts.items() if v.any())
    about = f"{len(lost):,} of {len(record.clients):,} requests: {kinds_of}."
    axes = {"x": {"label": "round"}, "y": {"label": "requests", "whole": True}}
    return [spec("bars", "Requests that brought nothing usable", about, categories=names, series=series, **axes)]


def chart_privacy(record: Record) -> list[Spec]:
    """Epsilon by round, beside the metric that the run is judged by: over the same rounds, and over epsilon."""
    rounds, told = record.history.numbers("round"), record.summary.get("privacy")
    names = [n for n in record.history.names if n.startswith("epsilon")]
    series = [s for n in names if (s := line(n, rounds, record.history.numbers(n)))["y"]]
    if not series:
        return []
    about = "; ".join(f"{s['name']} grows to {figure(s['y'][-1])}" for s in series) + "."
    budget = told.get("budget") if isinstance(told, dict) else None
    if isinstance(budget, int | float) and budget > 0:
        series.append(line("budget", rounds, np.full(len(rounds), float(budget)), dash="6 3", tint=len(series)))
        about += f" The budget is {figure(float(budget))}."
    title = "Epsilon spent" if "epsilon" in names else "Not private: epsilon, if noise and draws were secret"
    made = [spec("lines", title, about, x=ROUND, y={"label": "epsilon", "zero": True}, series=series)]
    judge, spent = record.history.numbers(record.judge), record.history.numbers(names[0])
    if not np.isnan(judge).all():
        said = trend(record.judge, [v for v in judge.tolist() if v == v], record.direction(record.judge)) + "."
        axes = {"x": ROUND, "y": {"label": record.judge}}
        made.append(spec("lines", f"{record.judge} by round", said, series=[line(record.judge, rounds, judge)], **axes))
        axes = {"x": {"label": names[0]}, "y": {"label": record.judge}}
        bought = [line(record.judge, spent, judge)]
        made.append(spec("lines", f"{record.judge} by {names[0]} spent", said, series=bought, **axes))
    clips = record.history.numbers("clip")
    if not np.isnan(clips).all():
        said = trend("the longest update that counts", [v for v in clips.tolist() if v == v], None) + "."
        axes = {"x": ROUND, "y": {"label": "clip", "zero": True}}
        made.append(spec("lines", "Clip by round", said, series=[line("clip", rounds, clips)], **axes))
    return made
