"""The charts of a run as plain tables: what `charts.js` draws, with a sentence each for those who cannot see it.

Of the clients they show who holds what, and who took part when, how often and how evenly.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from mutirao.metrics import Direction, direction_of, gini
from mutirao.partitioning.heterogeneity import SAMPLES
from mutirao.report.html_page import is_steady
from mutirao.report.sentences import STARTS, WAYS, begin, count, duration, figure, in_order, label_of
from mutirao.runs.csv_tables import CLIENTS, SIMULATED
from mutirao.runs.participation import lorenz as lorenz_of
from mutirao.runs.progress import size
from mutirao.runs.reader import Columns, Counts, Floats, Record, clean, json_of

Spec = dict[str, Any]
MOST_COLUMNS = 200  # of rounds: more are counted together
MOST_DOTS = 4000  # of a scatter
ROUND = {"label": "round", "whole": True}
AT_CLIENTS = " at the clients"
BAND = " The band holds the middle 80% of clients."


def spec(kind: str, title: str, about: str, **rest: Any) -> Spec:
    """One chart."""
    return {"kind": kind, "title": title, "about": begin(about), **rest}


def line(name: str, x: Floats, y: Floats, **rest: Any) -> dict[str, Any]:
    """One curve, where it has values."""
    keep = ~np.isnan(y)
    extra = {k: clean(v[keep]) if isinstance(v, np.ndarray) else v for k, v in rest.items()}
    return {"name": name, "x": clean(x[keep]), "y": clean(y[keep]), **extra}


def family(metric: str) -> str:
    """Curves of one family share a chart: `loss` and `train_loss`, `ndcg@1` and `ndcg@5`."""
    name = next((metric.removeprefix(start) for start in STARTS if metric.startswith(start)), metric).partition("@")[0]
    if name == "acc":
        name = "accuracy"
    stem, _, last = name.removesuffix("_decile").rpartition("_")
    at_clients = stem and last in ("worst", "p10", "p50", "p90", "mean", "own")
    if at_clients:
        return f"{stem}{AT_CLIENTS}"
    return name


def distinct_metrics(record: Record) -> list[str]:
    """Evaluation metrics without those that repeat another one or a sentence of the page."""
    kept: dict[str, Floats] = {}
    for name in record.metrics:
        values = record.history.numbers(name)
        if not is_reference(record, name) and not any(says_again(values, other) for other in kept.values()):
            kept[name] = values
    return list(kept)


def says_again(values: Floats, other: Floats) -> bool:
    """Whether values that move are those of another metric, but for rounding, in every round that has either."""
    known = values[~np.isnan(values)]
    moves = len(known) > 1 and known.min() < known.max()
    return moves and bool(np.allclose(values, other, rtol=1e-5, atol=1e-9, equal_nan=True))


def is_reference(record: Record, name: str) -> bool:
    """Whether a metric compares groups with what a client could have instead: `group_sentences` has those."""
    references = record.summary.get("references")
    ends = ("_served", *(f"_{way}" for way in WAYS))
    return isinstance(references, dict) and isinstance(references.get("means"), dict) and name.endswith(ends)


def chart_curves(record: Record) -> list[Spec]:
    """Metrics by round, one chart a family, the primary metric first."""
    trained = [n for n in record.history.names if n.startswith("train_")]
    chosen = [m for m in distinct_metrics(record) if not m.endswith("_clients") and not m.startswith("epsilon")]
    families: dict[str, list[str]] = {}
    for name in [*chosen, *trained]:
        families.setdefault(family(name), []).append(name)
    rounds = record.history.numbers("round")
    made = []
    for title, names in families.items():
        series = []
        said = []
        for i, name in enumerate(names):
            values = record.history.numbers(name)
            if np.isnan(values).all():
                continue
            label = label_of(name)
            look: dict[str, Any] = {"tint": i, "dash": ""}
            if name.startswith("train_"):
                look |= {"dash": "6 3", **band_of(record, name.removeprefix("train_"), rounds)}
            series.append(line(label, rounds, values, **look))
            said.append(trend(label, series[-1]["y"], record.direction(name)))
        # Clients are usually evaluated only at the end: the table has these values, and one point is no curve.
        once = title.endswith(AT_CLIENTS) and all(len(curve["x"]) == 1 for curve in series)
        if series and not once:
            about = "; ".join(said[:3]) + "."
            if any("lo" in s and len(s["x"]) > 1 for s in series):
                about += BAND
            made.append(spec("lines", label_of(title), about, x=ROUND, y={"label": ""}, series=series))
    return made


def band_of(record: Record, name: str, rounds: Floats) -> dict[str, Floats]:
    """The range of eight in ten clients in training, by round; empty if a round lacks it."""
    reported_in = record.clients.numbers("round")
    values = record.clients.numbers(name)
    keep = ~np.isnan(values)
    at, low, _, high = spread_of(reported_in[keep], values[keep])
    if np.array_equal(at, rounds) and (low < high).any():
        return {"lo": low, "hi": high}
    return {}


def trend(name: str, values: Sequence[float], way: Direction | None) -> str:
    """A curve in words, with its best value if it is known which way is better."""
    if len(values) < 2:
        return f"{name} {figure(values[0])}"
    if min(values) == max(values):
        return f"{name} stays at {figure(values[0])}"
    text = f"{name} from {figure(values[0])} to {figure(values[-1])}"
    if not way:
        return text
    best = min(values) if way == "lower" else max(values)
    return f"{text}, best {figure(best)}"


def chart_weights(record: Record) -> Iterator[Spec]:
    """Weights of clients by round, coloured by risk where there is one, and the method's own figures."""
    table = record.clients
    rounds = table.numbers("round")
    weight = table.numbers("weight")
    used = weight > 0
    if used.any() and "risk" in table:
        risk = table.numbers("risk")
        rows = np.flatnonzero(~np.isnan(risk) & ~np.isnan(weight))
        # More dots would overlap and make the page heavy.
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
    trained = {label_of(name) for name in record.history.names if name.startswith("train_")}
    for name in table.names:
        shown = name in CLIENTS - SIMULATED or label_of(f"train_{name}") in trained
        if shown or np.isnan(values := table.numbers(name)).all():
            continue
        keep = ~np.isnan(values)
        yield chart_spread(label_of(name), rounds[keep], values[keep], f"{label_of(name)}, over the clients of a round")
    if used.any() and "age" in table:
        yield chart_spread("age", rounds[used], table.numbers("age")[used], "Rounds since a client was last selected")


def chart_spread(name: str, rounds: Floats, values: Floats, title: str) -> Spec:
    """The median and the outer tenths of a client figure, by round."""
    at, low, middle, high = spread_of(rounds, values)
    about = trend(f"The median client's {name}", middle.tolist(), None) + "."
    if (low < high).any():
        flat = len({*low.tolist()}) == len({*high.tolist()}) == 1
        if flat:
            about += f" Eight in ten clients are between {figure(low[0])} and {figure(high[0])}."
        else:
            about += BAND
    return spec("lines", title, about, x=ROUND, y={"label": name}, series=[line(name, at, middle, lo=low, hi=high)])


def spread_of(rounds: Floats, values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """The rounds there are, and in each the first tenth, the median and the last tenth of the values."""
    # Sorted by round, then by value: the quantiles of all rounds are read off without a loop over rounds.
    order = np.lexsort((values, rounds))
    at, starts, counts = np.unique(rounds[order], return_index=True, return_counts=True)
    low, middle, high = (quantile(values[order], starts, counts, q) for q in (0.1, 0.5, 0.9))
    return at, low, middle, high


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
    tints = tints_of(found)
    plane = Columns(record.path / "plane.csv")
    if len(plane):
        of = {c: g for g, members in found.items() for c in members}
        names = plane.texts("client")
        x = plane.numbers("x")
        y = plane.numbers("y")
        series = []
        for group in sorted({of.get(c, "none") for c in names}, key=in_order):
            rows = [i for i, c in enumerate(names) if of.get(c, "none") == group]
            labels = [names[i] for i in rows]
            series.append({"name": group, "x": clean(x[rows]), "y": clean(y[rows]), "labels": labels})
            if group in tints:
                series[-1]["tint"] = tints[group]
        about = f"{len(names)} clients by what they sent, in {len(found)} groups; near points are similar clients."
        axes = {"x": {"label": "first direction"}, "y": {"label": "second direction"}, "big": True}
        yield spec("scatter", "Clients in the plane", about, series=series, **axes)
    # Groups of equal size need no chart, as the table lists the sizes.
    if len({len(v) for v in found.values()}) > 1:
        sizes = [{"name": "clients", "values": [len(v) for v in found.values()]}]
        axes = {"x": {"label": "group"}, "y": {"label": "clients", "whole": True}}
        about = "; ".join(f"{g} has {len(v)}" for g, v in list(found.items())[:12]) + "."
        yield spec("bars", "Clients of each group", about, categories=list(found), series=sizes, **axes)
    yield from chart_scores(record, tints)
    yield from chart_training(record.clients, tints)


def tints_of(groups: Iterable[str]) -> dict[str, int]:
    """One colour for a group, in all charts."""
    return {group: i for i, group in enumerate(sorted(groups, key=in_order))}


def chart_scores(record: Record, tints: dict[str, int]) -> Iterator[Spec]:
    """The primary metric of each group's model by round."""
    scores = json_of(record.path / "groups.json").get("scores")
    if not isinstance(scores, dict):
        return
    metric = record.monitor or "accuracy"
    series = []
    for group, rows in scores.items():
        known = [r for r in rows if isinstance(r, dict) and isinstance(r.get(metric), int | float)]
        rounds, values = (np.array([float(r.get(k, 0)) for r in known]) for k in ("round", metric))
        if known:
            series.append(line(group, rounds, values, tint=tints.get(group, len(tints))))
    if series:
        about = "; ".join(trend(s["name"], s["y"], record.direction(metric)) for s in series[:6]) + "."
        yield spec("lines", f"{metric} of each group", about, x=ROUND, y={"label": metric}, series=series)


def chart_training(table: Columns, tints: dict[str, int]) -> Iterator[Spec]:
    """What clients reported in training, as the mean of their group."""
    if "group" not in table:
        return
    (groups, codes), rounds = table.codes("group"), table.numbers("round")
    for name in ("accuracy", "loss"):
        values = table.numbers(name)
        if np.isnan(values).all():
            continue
        series = []
        for group in sorted({*groups} - {""}, key=in_order):
            rows = (codes == groups.index(group)) & ~np.isnan(values)
            at, place = np.unique(rounds[rows], return_inverse=True)
            means = np.bincount(place, values[rows]) / np.bincount(place)
            if len(at):
                series.append(line(group, at, means, tint=tints.get(group, len(tints))))
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
        about = f"The median is {duration(float(np.median(known)))}, the longest {duration(float(known.max()))}."
        axes = {"x": ROUND, "y": {"label": "seconds", "zero": True}}
        yield spec("lines", "Seconds of each round", about, series=series, **axes)
    primary = history.numbers(record.monitor)
    passed = np.cumsum(np.nan_to_num(history.numbers("sim_seconds")))
    if passed.any() and not np.isnan(primary).all():
        said = trend(record.monitor, line("", rounds, primary)["y"], record.direction(record.monitor))
        about = f"{said} after {figure(float(passed[-1]))} simulated seconds."
        axes = {"x": {"label": "simulated seconds"}, "y": {"label": record.monitor}}
        series = [line(record.monitor, passed, primary)]
        yield spec("lines", f"{record.monitor} by simulated time", about, series=series, **axes)


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
    """Epsilon by round, and the primary metric over epsilon."""
    rounds = record.history.numbers("round")
    privacy = record.summary.get("privacy")
    names = [n for n in record.history.names if n.startswith("epsilon")]
    series = [s for n in names if (s := line(n, rounds, record.history.numbers(n)))["y"]]
    if not series:
        return []
    about = "; ".join(f"{s['name']} grows to {figure(s['y'][-1])}" for s in series) + "."
    budget = privacy.get("budget") if isinstance(privacy, dict) else None
    if isinstance(budget, int | float) and budget > 0:
        series.append(line("budget", rounds, np.full(len(rounds), float(budget)), dash="6 3", tint=len(series)))
        about += f" The budget is {figure(float(budget))}."
    title = "Epsilon spent" if "epsilon" in names else "Not private: epsilon, if noise and draws were secret"
    made = [spec("lines", title, about, x=ROUND, y={"label": "epsilon", "zero": True}, series=series)]
    primary = record.history.numbers(record.monitor)
    spent = record.history.numbers(names[0])
    if not np.isnan(primary).all():
        said = trend(record.monitor, [v for v in primary.tolist() if v == v], record.direction(record.monitor)) + "."
        axes = {"x": {"label": names[0]}, "y": {"label": record.monitor}}
        bought = [line(record.monitor, spent, primary)]
        made.append(spec("lines", f"{record.monitor} by {names[0]} spent", said, series=bought, **axes))
    clips = record.history.numbers("clip")
    if not np.isnan(clips).all():
        said = trend("the longest update that counts", [v for v in clips.tolist() if v == v], None) + "."
        clip = {"x": ROUND, "y": {"label": "clip", "zero": True}, "series": [line("clip", rounds, clips)]}
        made.append(spec("lines", "Clip by round", said, **clip))
    return made


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
    held = f"{between(total)} samples"
    title = "Samples of each client"
    labels = classes
    if classed:
        held += f" of {between(kinds)} of {len(classes)} classes"
        title = "Who has what"
        labels = [f"class {c}" for c in classes]
    if step > 1:
        held += f"; {len(rows)} of {len(names):,} clients are shown"
    # Without a partition.csv only clients that replied are known, which may not be all.
    who = f"Each of the {len(names):,} clients that took part"
    if len(names) == 1:
        who = "The one client"
    elif record.population <= len(names):
        who = "Each client"
    about = f"{who} holds {held}."
    series = [{"name": label, "values": clean(counts[i, rows])} for i, label in enumerate(labels)]
    bars = {"x": {"label": "client"}, "y": {"label": "samples", "whole": True}, "lying": True, "series": series}
    return [spec("bars", title, about, categories=[names[r] for r in rows], **bars)]


def sizes_differ(record: Record) -> tuple[list[str], Floats]:
    """How many samples clients said they trained on, of those that replied; a row, as of one class."""
    names, codes = record.clients.codes("client")
    declared = np.nan_to_num(record.clients.numbers("n"))
    most = np.zeros(len(names))
    np.maximum.at(most, codes, declared)
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
        # If all were selected equally often, the Lorenz curve is the diagonal.
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
    grouped = ""
    down = "client"
    if tall > 1:
        grouped += f" A row stands for {tall:,} clients."
        down = "clients"
    if wide > 1:
        grouped += f" A column stands for {wide} rounds."
    every = f"each in {between(counts)} rounds"
    if counts.min() == last:
        every = "each in every round"
    about = f"{count(len(order), 'client')} over {count(last, 'round')}, {every}.{grouped}"
    cells = {"rows": rows, "cols": cols, "values": values.tolist(), "most": int(max(1, values.max())), "unit": "times"}
    axes = {"x": {"label": "round"}, "y": {"label": down}}
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
    even = {"name": "if all were selected equally", "x": [0, 1], "y": [0, 1], "tint": 6, "dash": "2 3", "plain": True}
    series = [line("selections", people[keep], share[keep], plain=True), even]
    about = f"The half of the clients selected least has {half:.0%} of the selections; Gini index {gini(values):.3f}."
    axes = {"x": {"label": "share of clients"}, "y": {"label": "share of selections", "zero": True}}
    return spec("lines", "Lorenz curve of selection", about, series=series, **axes)
