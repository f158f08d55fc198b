"""What happened in a run, in plain sentences for pages and terminals."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from mutirao.metrics import gini
from mutirao.report.run_state import RunState
from mutirao.runs.progress import size
from mutirao.runs.reader import Record


def count(many: int, thing: str) -> str:
    """`1 client`, `2 clients`, `1,000 clients`."""
    return f"{many:,} {thing}{'' if many == 1 else 's'}"


def figure(value: float) -> str:
    """A number with four figures."""
    return f"{value:.4g}"


ENDS = {
    "_worst_decile": "worst tenth of clients",
    "_worst": "worst client",
    "_mean": "mean of clients",
    "_p10": "10th percentile of clients",
    "_p50": "median client",
    "_p90": "90th percentile of clients",
}
STARTS = {"train_": "in training", "vali_": "on validation data", "val_": "on validation data"}
STARTS |= {"global_": "global model", "distributed_": "by the clients"}
WHOLE = {"acc": "accuracy", "sim_seconds": "simulated seconds", "sim_joules": "simulated joules"}
WHOLE |= {"auc": "AUC", "f1": "F1", "rmse": "RMSE", "mae": "MAE", "r2": "R²", "ece": "calibration error (ECE)"}
WHOLE |= {"rand": "Rand index of the groups", "gain_alone": "gain over each client alone"}
WHOLE |= {"gain_finetuned": "gain over FedAvg fine-tuned"}
WAYS = {"groups_finetuned": "groups fine-tuned", "finetuned": "FedAvg fine-tuned", "alone": "each client alone"}


def label_of(metric: str) -> str:
    """A metric as a page names it, in words that a line can be broken between.

    >>> label_of("accuracy_worst_decile"), label_of("train_loss"), label_of("ndcg@5")
    ('accuracy, worst tenth of clients', 'loss, in training', 'ndcg@5')
    """
    for start, said in STARTS.items():
        if metric.startswith(start) and metric != start:
            return f"{label_of(metric.removeprefix(start))}, {said}"
    for end, said in ENDS.items():
        if metric.endswith(end) and metric != end:
            return f"{label_of(metric.removesuffix(end))}, {said}"
    for end, said in WAYS.items():
        if metric.endswith(f"_{end}") and metric not in WHOLE:
            return f"{label_of(metric.removesuffix(f'_{end}'))}, {said}"
    return WHOLE.get(metric, metric.replace("_", " ").strip() or metric)


def begin(text: str) -> str:
    """Text with the capital letter of a sentence, unless it begins with a name such as `ndcg@5`.

    >>> begin("accuracy went up"), begin("ndcg@5 went up")
    ('Accuracy went up', 'ndcg@5 went up')
    """
    word = text.partition(" ")[0].rstrip(",;:.")
    if word.isalpha() and word not in NAMES:
        return f"{text[:1].upper()}{text[1:]}"
    return text


NAMES = ("ndcg", "mrr")  # metrics that are written in small letters


def in_order(name: str) -> list[Any]:
    """By which clients and groups are in the same order in all charts: `c2` before `c10`."""
    # Tuples of one shape: a number and a text cannot be compared with each other.
    return [(1, int(part), "") if part.isdecimal() else (0, 0, part) for part in re.split(r"(\d{1,18})", name)]


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    if seconds < 0.1:
        return f"{1000 * seconds:.2g} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def sentences(record: Record, state: RunState) -> list[str]:
    """The run in a few sentences: how it went, who took part, what was lost, what it cost."""
    sections = (
        quality_sentences,
        fairness_sentences,
        participation_sentences,
        failure_sentences,
        cost_sentences,
        group_sentences,
        privacy_sentences,
        checkpoint_sentences,
    )
    return [*progress_sentences(record, state), *(sentence for section in sections for sentence in section(record))]


def progress_sentences(record: Record, state: RunState) -> Iterator[str]:
    """How far the run came."""
    wanted = record.config.get("rounds")
    if state.name == "finished":
        seconds = record.summary.get("seconds")
        made = f"{count(record.rounds, 'round')} made"
        if seconds:
            made += f" in {duration(float(seconds))}"
        yield f"{made}."
    else:
        of = f" of {wanted:,}" if isinstance(wanted, int) else ""
        why = f": {state.why}" if state.why else ""
        yield f"{state.name.capitalize()} after {record.rounds:,}{of} rounds{why}."
    if record.summary.get("stopped"):
        yield f"It stopped early: {record.summary['stopped']}."
    if resumed := [e.get("round") for e in record.events if e.get("event") == "resumed"]:
        times = f"{len(resumed)} times, last" if len(resumed) > 1 else "once,"
        yield f"It was interrupted and went on {times} after round {resumed[-1]}."


def checkpoint_sentences(record: Record) -> Iterator[str]:
    """How much room the checkpoints take, and which were kept."""
    if isinstance(checkpoints := record.summary.get("checkpoints"), dict):
        yield f"{describe_checkpoints(checkpoints)}."


def describe_checkpoints(checkpoints: Mapping[str, Any]) -> str:
    """What a summary says of its checkpoints, in one sentence without its end."""
    kept = [int(n) for n in checkpoints.get("kept", [])]
    removed = int(checkpoints.get("removed", 0))
    made = [n for n in kept if n]
    parts = []
    if 0 in kept:
        parts.append("the start")
    if made and removed:
        parts.append(f"{'round' if len(made) == 1 else 'rounds'} {', '.join(map(str, made))}")
    elif made:
        parts.append(count(len(made), "round"))
    text = f"Checkpoints of {' and '.join(parts) or 'no round'} take {size(float(checkpoints.get('bytes', 0)))}"
    if removed:
        text += f"; {removed:,} more {'was' if removed == 1 else 'were'} removed (keep=all keeps them)"
    return text


def quality_sentences(record: Record) -> Iterator[str]:
    """How the metric that counts went."""
    metric = record.monitor
    values = record.history.numbers(metric)
    evaluated = ~np.isnan(values)
    rounds = record.history.numbers("round")[evaluated]
    values = values[evaluated]
    if len(values) < 2:
        return
    went = f"{begin(label_of(metric))} went from {figure(values[0])} to {figure(values[-1])}"
    way = record.direction(metric)
    if way is None:
        yield f"{went}; whether higher or lower is better is not known."
        return
    best = int(values.argmin() if way == "lower" else values.argmax())
    yield f"{went}; its best was {figure(values[best])} in round {rounds[best]:,.0f}."
    since = rounds[-1] - rounds[best]
    if since >= 10 and since >= 0.3 * rounds[-1]:
        yield f"No improvement in the last {since:,.0f} rounds."


def fairness_sentences(record: Record) -> Iterator[str]:
    """How evenly clients are served: the worst tenth of them, on their own test data."""
    final = record.summary.get("final")
    metrics = final if isinstance(final, dict) else {}
    mean, worst = (metrics.get(f"{record.monitor}_{part}") for part in ("mean", "worst_decile"))
    if isinstance(mean, int | float) and isinstance(worst, int | float):
        worst_tenth = f"the worst tenth of them have {figure(worst)}"
        yield f"On their own data clients have {label_of(record.monitor)} {figure(mean)} on average; {worst_tenth}."


def participation_sentences(record: Record) -> Iterator[str]:
    """Who took part, and how evenly."""
    (names, counts), total = record.participation(), record.population
    took = int(np.count_nonzero(counts))
    if not total or not len(record.clients):
        return
    never = total - took
    who = f"All {count(total, 'client')}"
    if never:
        who = f"{never:,} of {count(total, 'client')} never"
    elif total == 1:
        who = "The one client"
    all_counts = np.concatenate([counts, np.zeros(total - len(counts), counts.dtype)])
    if took < 2 or all_counts.min() == all_counts.max():
        each = ""
        if took > 1:
            each = f", {count(int(all_counts.max()), 'time')} each"
        yield f"{who} took part{each}."
        return
    if counts.max() < 2:
        yield f"{who} took part, the others once each."
        return
    busiest = int(counts.argmax())
    median = float(np.median(all_counts))
    often = f"{median:g} times" if median % 1 else count(int(median), "time")
    yield (
        f"{who} took part. The median client took part {often}, "
        f"the busiest ({names[busiest]}) {count(int(counts[busiest]), 'time')}; "
        f"the Gini index is {gini(all_counts):.2f}, and would be 0 if all took part equally often."
    )


def failure_sentences(record: Record) -> Iterator[str]:
    """What failed or was rejected."""
    asked = len(record.clients)
    kinds = Counter(kind for _, _, kind, _ in record.lost())
    if not asked:
        return
    if not kinds:
        yield "Every client that was selected gave a usable reply."
        return
    most = ", ".join(f"{kind} {n}" for kind, n in kinds.most_common(3))
    yield f"{kinds.total():,} of {asked:,} requests brought nothing usable ({most})."
    tries, codes = record.clients.codes("try")
    if again := int(np.count_nonzero(np.array([t not in ("", "1") for t in tries], np.bool_)[codes])):
        yield f"Rounds had to be tried again for lack of replies ({count(again, 'request')})."


def cost_sentences(record: Record) -> Iterator[str]:
    """Bytes."""
    down, up = (float(np.nansum(record.history.numbers(n))) for n in ("bytes_down", "bytes_up"))
    if down or up:
        yield f"{size(down)} went to the clients and {size(up)} came back."


def group_sentences(record: Record) -> Iterator[str]:
    """Groups that were formed."""
    if found := record.groups():
        sizes = sorted(len(v) for v in found.values())
        span = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]} to {sizes[-1]}"
        yield f"{count(len(found), 'group')} of {span} clients."
    references = record.summary.get("references")
    means = references.get("means") if isinstance(references, dict) else None
    if isinstance(references, dict) and isinstance(means, dict):
        each = [f"{WAYS.get(way, way)} {figure(v)}" for way, v in means.items() if isinstance(v, float)]
        served = str(references.get("served", ""))
        means_said = f"Mean {label_of(str(references.get('judge')))} at clients: {', '.join(each)}"
        yield f"{means_said}; the models that clients are given: {WAYS.get(served, served)}."
        yield from (f"{str(line)[:1].upper()}{str(line)[1:]}." for line in references.get("warnings") or ())


def privacy_sentences(record: Record) -> Iterator[str]:
    """The unit that differential privacy protects and the epsilon spent, or that the noise does not protect."""
    spent = record.privacy()
    privacy = record.summary.get("privacy")
    protects = str(privacy.get("protects", "")) if isinstance(privacy, dict) else ""
    if (would := spent.get("epsilon_if_secret")) is not None:
        yield f"Not private: it protects {protects or 'no one'}; with secret noise, epsilon would be {figure(would)}."
    elif (epsilon := spent.get("epsilon")) is not None:
        unit = f" It protects {protects}." if protects else ""
        most = f" of {figure(spent['budget'])}" if spent.get("budget") else ""
        yield f"Privacy spent: epsilon {figure(epsilon)}{most} at delta {figure(spent.get('delta', 0.0))}.{unit}"
