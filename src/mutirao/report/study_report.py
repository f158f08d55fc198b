"""The report of a study: what may be said, tables with intervals and tests, curves with bands, every run a point."""

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from mutirao.metrics import Direction, direction_of
from mutirao.report.charts import ROUND, Spec, spec
from mutirao.report.html_page import Page
from mutirao.report.plots import average
from mutirao.report.run_state import state_in
from mutirao.report.sentences import count, figure
from mutirao.research_notice import notice_of
from mutirao.runs.reader import Columns, Record, clean, json_of

Table = Mapping[str, Any]


def records_of(folder: Path, cells: Mapping[str, str]) -> dict[str, Record]:
    """The runs of a study that have begun."""
    return {name: Record.of(folder / "cells" / name) for name, state in cells.items() if state != "not begun"}


def common_of(configs: Iterable[Table]) -> tuple[dict[str, Any], set[str]]:
    """The settings that are the same in all configurations, and the keys of the others; seeds are neither.

    >>> common_of([{"lr": 0.1, "rounds": 5, "seed": 0}, {"lr": 0.2, "rounds": 5, "seed": 1}])
    ({'rounds': 5}, {'lr'})
    """
    every = list(configs)
    keys = dict.fromkeys(key for config in every for key in config if key != "seed")
    same = [k for k in keys if all(k in config and config[k] == every[0][k] for config in every)]
    return {k: every[0][k] for k in same}, {*keys} - {*same}


def lines_of(settings: Table) -> str:
    """Settings as lines of a configuration, parts by their dotted keys."""
    lines = []
    for key, value in settings.items():
        inside = value.items() if isinstance(value, Mapping) else [("", value)]
        lines += [f"{f'{key}.{k}'.removesuffix('.name').removesuffix('.')} = {v}" for k, v in inside]
    return "\n".join(lines)


def address_of(folder: Path, cell: str) -> str:
    """Where a run is, as seen from the study's page: its report if it has one, else its folder."""
    page = folder / "cells" / cell / "report.html"
    return quote(f"cells/{cell}/{page.name if page.is_file() else ''}")


MEANS = ("method", "verdict", "mean", "± 95%", "best", "wobble")
TESTS = ("difference", "p", "p two-sided", "p t", "p Holm")
SIZES = ("method", "r", "delta", "d")
BESIDE = ("method", "ours", "published", "ours - published", "in our interval", "rounds to", "published rounds", "from")


def study_page(folder: Path) -> Page:
    """The page of a study, finished or not."""
    table = json_of(folder / "table.json")
    plan = json_of(folder / "study.json")
    lines = [x for x in table.get("lines", []) if isinstance(x, dict)]
    cells = cell_states(folder, plan)
    recipe = str(table.get("recipe") or plan.get("recipe") or "")
    page = Page(f"{folder.name}: a Mutirão study")
    done = sum(state == "finished" for state in cells.values())
    page.heading(folder.name, "finished" if done == len(cells) else "stopped", f"a study of {recipe}" if recipe else "")
    records = records_of(folder, cells)
    common, _ = common_of(record.config for record in records.values())
    page.warn(notice_of({"recipe": recipe, **common}))
    add_reproduction(page, json_of(folder / "reproduction.json"))
    page.words(study_sentences(table, lines, cells))
    metrics = list(dict.fromkeys(str(x["metric"]) for x in lines))
    goals = thresholds_of(plan)
    page.figures(study_headline(table, lines, metrics, cells))
    for metric in metrics:
        of_metric = [x for x in lines if x["metric"] == metric]
        page.section(metric)
        head = [*MEANS, *TESTS]
        if metric in goals:
            head.insert(len(MEANS), f"rounds to {figure(goals[metric])}")
        rows = [table_row(x, metric in goals) for x in of_metric]
        page.table(f"Methods by {metric}", head, rows, numbers=range(2, len(head)))
        if sizes := [row for x in of_metric if any((row := size_row(x))[1:])]:
            page.hidden_table(f"Effect sizes of {metric}", SIZES, sizes)
        if published := [beside_row(x) for x in of_metric if isinstance(x.get("published"), dict)]:
            page.table(f"Published {metric} beside ours", BESIDE, published, numbers=range(1, 7))
        methods = list(dict.fromkeys(str(x["method"]) for x in of_metric))
        page.charts([*chart_bands(folder, metric, methods), chart_dots(of_metric, plan)])
    page.section("How to read it")
    page.words(
        [
            "mean ± 95%: of the final value over folds and seeds, Student's interval.",
            "difference: paired with the baseline over the same fold and seed; positive is better.",
            "p, p two-sided: Wilcoxon's signed-rank test of 'better than the baseline', and of 'not the same'.",
            "p t: Student's t, two-sided, of the interval of the difference; p Holm: that for several methods at once.",
            "verdict: better or worse only if the interval of the difference leaves zero out, that is if p t < 0.05.",
            "wobble: standard deviation over the last rounds; r, delta and d: effect sizes with bootstrap intervals.",
            *threshold_words(table, goals),
            *shared_words(table),
        ]
    )
    if open_cells := {k: v for k, v in cells.items() if v != "finished"}:
        page.section("Not finished")
        page.table("Runs that are not finished", ("run", "state"), list(open_cells.items())[:300])
    page.section("What differs between the methods")
    page.table("Settings of each method", ("method", "settings"), settings_of(records))
    if common:
        page.section("What all runs share")
        page.code("Settings that are the same in all runs", lines_of(common))
    page.section("Its runs")
    page.links("Runs of each method", ("method", "runs"), runs_of(folder, records))
    return page


def thresholds_of(plan: dict[str, Any]) -> dict[str, float]:
    """The values that `rounds to` counts up to, by metric."""
    thresholds = plan.get("threshold")
    if isinstance(thresholds, dict):
        return {k: float(v) for k, v in thresholds.items() if isinstance(v, int | float)}
    return {}


def list_in(table: Table, key: str) -> list[Any]:
    """The list below a key, empty if there is none: the files of a folder from elsewhere may contain anything."""
    found = table.get(key)
    if isinstance(found, list):
        return found
    return []


def declared_direction(table: Table, metric: str) -> Direction | None:
    """Which way a metric is better, as the table of a study declares it or as it is known by its name."""
    declared = table.get("directions")
    if isinstance(declared, dict):
        return direction_of(metric, declared)
    return direction_of(metric)


def threshold_words(table: dict[str, Any], goals: dict[str, float]) -> Iterator[str]:
    """What `rounds to` means, for each metric that has a threshold."""
    for metric, goal in goals.items():
        lower = declared_direction(table, metric) == "lower"
        yield (
            f"rounds to {figure(goal)}: the median number of rounds until {metric} is at "
            f"{'most' if lower else 'least'} {figure(goal)}; in brackets, how many of the runs came there."
        )


def runs_of(folder: Path, records: dict[str, Record]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The runs of each method, with their addresses."""
    rows: dict[str, list[tuple[str, str]]] = {}
    for cell in records:
        method, _, place = cell.rpartition("/")
        rows.setdefault(method, []).append((place, address_of(folder, cell)))
    return list(rows.items())


def add_reproduction(page: Page, outcome: dict[str, Any]) -> None:
    """What a reproduction is of, on which data, what was left out, and its verdicts; nothing of another study."""
    claims = outcome.get("claims")
    if not isinstance(claims, list):
        return
    page.note(f"{outcome.get('title', '')}. {outcome.get('paper', '')}.")
    page.note(f"{outcome.get('data', '')}.")
    page.words(f"Cut, {line}" for line in list_in(outcome, "cuts"))
    head = ("claim", "published", "ours", "verdict", "rule")
    keys = ("says", "published", "ours", "verdict", "rule")
    rows = [tuple(str(c.get(k, "")) for k in keys) for c in claims if isinstance(c, dict)]
    page.section("Do the claims hold?")
    page.table("Claims and verdicts", head, rows)


def cell_states(folder: Path, plan: dict[str, Any]) -> dict[str, str]:
    """The runs of the study, planned or found, with their states."""
    found = [f.parent.relative_to(folder / "cells").as_posix() for f in (folder / "cells").glob("*/*/config.toml")]
    planned = [c for c in list_in(plan, "cells") if isinstance(c, str)]
    states = dict.fromkeys([*planned, *sorted(found)], "not begun")
    for name in found:
        place = folder / "cells" / name
        state = state_in(Record.of(place))
        states[name] = f"failed: {state.why}" if state.name == "failed" else state.name
    return states


def study_sentences(table: dict[str, Any], lines: list[dict[str, Any]], cells: dict[str, str]) -> Iterator[str]:
    """What the study allows to say."""
    done = sum(s == "finished" for s in cells.values())
    yield f"{done} of {count(len(cells), 'run')} finished."
    baseline = table.get("baseline")
    for metric in dict.fromkeys(str(x["metric"]) for x in lines):
        of_metric = [x for x in lines if x["metric"] == metric and isinstance(x.get("mean"), int | float)]
        if not of_metric:
            continue
        if (best := best_of(of_metric, metric, table)) is None:
            yield f"{metric}: no method is called better or worse, as its direction is not declared."
            continue
        yield f"{metric}: {best['method']} has the best mean, {figure(best['mean'])}."
        rivals = [x for x in of_metric if x["method"] != baseline]
        for verdict in ("better", "worse"):
            if shown := [x for x in rivals if x.get("verdict") == verdict]:
                said = ", ".join(
                    f"{x['method']} (by {abs(x['difference']):.4f} ± {x['difference_half'] or math.nan:.4f})"
                    for x in shown
                )
                yield f"{metric}: {verdict} than {baseline} beyond its 95% interval: {said}."
        if unshown := [str(x["method"]) for x in rivals if x.get("verdict") == "not shown"]:
            yield f"{metric}: no difference from {baseline} is shown for {', '.join(unshown)}."


def best_of(lines: list[dict[str, Any]], metric: str, table: dict[str, Any]) -> dict[str, Any] | None:
    """The line with the best mean; None if there is none, or if the direction of the metric is not declared."""
    way = declared_direction(table, metric)
    if not lines or not way:
        return None
    best = min if way == "lower" else max
    return best(lines, key=lambda x: x["mean"])


def study_headline(
    table: dict[str, Any], lines: list[dict[str, Any]], metrics: list[str], cells: dict[str, str]
) -> dict[str, tuple[str, str]]:
    """Best method by metric, and how large the study is."""
    out: dict[str, tuple[str, str]] = {}
    for metric in metrics[:6]:
        known = [x for x in lines if x["metric"] == metric and isinstance(x.get("mean"), int | float)]
        if (best := best_of(known, metric, table)) is not None:
            out[f"best {metric}"] = (figure(best["mean"]), str(best["method"]))
    out["methods"] = (str(len({x["method"] for x in lines})), "")
    out["runs"] = (str(len(cells)), "")
    return out


def shared_words(table: dict[str, Any]) -> Iterator[str]:
    """Of data that runs have in common, if they do."""
    shared = table.get("shared")
    if isinstance(shared, int | float) and shared:
        yield (
            f"The runs share data, {shared:.3g} test samples for each training sample: the variance of the difference "
            "is Nadeau and Bengio's. Wilcoxon's p and the effect sizes know no such correction."
        )


def text_of(x: dict[str, Any], key: str, form: str = ".4f") -> str:
    """A number as text, or nothing."""
    value = x.get(key)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return format(value, form)
    return ""


def with_half(text: str, half: str) -> str:
    """A value as text, with half the width of its interval if that is known."""
    if half:
        return f"{text} ± {half}"
    return text


def table_row(x: dict[str, Any], timed: bool) -> tuple[str, ...]:
    """A line of the table as texts; `timed` if it has the rounds to a threshold."""
    difference = with_half(text_of(x, "difference", "+.4f"), text_of(x, "difference_half"))
    tests = (text_of(x, key, ".3g") for key in ("p", "p_two_sided", "p_t", "p_holm"))
    means = (text_of(x, key) for key in ("mean", "half_t", "best", "wobble"))
    reached = (str(x.get("rounds_to") or ""),) if timed else ()
    return (str(x["method"]), str(x.get("verdict", "")), *means, *reached, difference, *tests)


def size_row(x: dict[str, Any]) -> tuple[str, ...]:
    """The effect sizes of a line, with their intervals."""

    def size(key: str, form: str = "+.2f") -> str:
        ends = x.get(f"{key}_95")
        known = isinstance(ends, list) and len(ends) == 2 and all(isinstance(end, int | float) for end in ends)
        return text_of(x, key, form) + (f" [{ends[0]:{form}}, {ends[1]:{form}}]" if known and ends else "")

    return (str(x["method"]), size("r", ".2f"), size("delta"), size("d"))


def beside_row(x: dict[str, Any]) -> tuple[str, ...]:
    """What is published of a line, beside ours."""
    published = x["published"]
    value = with_half(text_of(published, "value", ".4g"), text_of(published, "half", ".4g"))
    within = {True: "yes", False: "no"}.get(published.get("within"), "")
    ours = (str(x["method"]), with_half(text_of(x, "mean"), text_of(x, "half_t")))
    rounds = (str(x.get("rounds_to") or ""), text_of(published, "rounds", "g"))
    source = ". ".join(str(published[key]) for key in ("source", "note") if published.get(key))
    return (*ours, value, text_of(published, "apart", "+.4f"), within, *rounds, source)


def chart_bands(folder: Path, metric: str, methods: list[str]) -> list[Spec]:
    """The mean curve of each method over its runs, with the 95% interval of the mean."""
    series = []
    for i, method in enumerate(methods):
        runs = [Columns(file) for file in sorted((folder / "cells" / method).glob("*/history.csv"))]
        points = [zip(run.numbers("round").tolist(), run.numbers(metric).tolist(), strict=True) for run in runs]
        # NaN is not equal to itself: rounds without an evaluation are left out.
        rounds, mean, half = average([p for p in run if p[1] == p[1]] for run in points)
        if not len(rounds):
            continue
        one: dict[str, Any] = {"name": method, "x": rounds.tolist(), "y": clean(mean), "tint": i}
        # More bands would cover each other.
        if len(methods) <= 6 and half.any():
            one |= {"lo": clean(mean - half), "hi": clean(mean + half)}
        series.append(one)
    if not series:
        return []
    about = "; ".join(f"{s['name']} ends at {figure(s['y'][-1])}" for s in series[:6]) + "."
    about = f"Mean over runs, with its 95% interval. {about}"
    return [spec("lines", f"{metric} by round", about, x=ROUND, y={"label": metric}, series=series)]


def chart_dots(lines: list[dict[str, Any]], plan: dict[str, Any]) -> Spec:
    """Every run as a point, the mean and its interval as a line."""
    metric = str(lines[0]["metric"])
    places: dict[str, list[str]] = {}
    for cell in list_in(plan, "cells"):
        method, _, place = str(cell).rpartition("/")
        places.setdefault(method, []).append(place)
    methods = [str(x["method"]) for x in lines]
    points = [clean(x.get("values") or []) for x in lines]
    names = []
    for method, values in zip(methods, points, strict=True):
        cells = places.get(method, [])
        # A table of a part of the runs does not say which: its points get numbers instead of folds and seeds.
        if len(cells) != len(values):
            cells = [f"run {i + 1}" for i in range(len(values))]
        names.append(cells)
    rest = {"mean": [x.get("mean") for x in lines], "half": [x.get("half_t") for x in lines], "y": {"label": metric}}
    many = f"{sum(map(len, points))} runs of {count(len(methods), 'method')}"
    about = f"{many}; the line is the mean with its 95% interval."
    return spec("dots", f"{metric} of every run", about, categories=methods, points=points, names=names, **rest)


def settings_of(records: dict[str, Record]) -> list[tuple[str, str]]:
    """The settings by which the methods differ."""
    configs: dict[str, dict[str, str]] = {}
    for name, record in records.items():
        configs.setdefault(name.rpartition("/")[0], flatten(record.config))
    keys = sorted({k for c in configs.values() for k in c})
    differ = [k for k in keys if len({c.get(k) for c in configs.values()}) > 1]
    return [(m, ", ".join(f"{k} = {c[k]}" for k in differ if k in c) or "the same") for m, c in configs.items()]


def flatten(config: dict[str, Any]) -> dict[str, str]:
    """A configuration as dotted keys."""
    out: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            out |= {f"{key}.{k}".removesuffix(".name"): str(v) for k, v in value.items()}
        elif key != "seed":
            out[key] = str(value)
    return out
