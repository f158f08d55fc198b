"""Evaluation at each client, not only on a common test set: a mean hides clients with a bad model."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from mutirao.core.fleet import ClientId, Fleet, Request
from mutirao.core.rounds import Run
from mutirao.core.validation import SIZE_CAP, cap_sizes, fault_of_extras, sift
from mutirao.errors import ConfigError

AT_ONCE = 10_000  # clients asked at a time, which bounds the memory for a million of them
NONE: Mapping[str, bool] = {}


def across_clients(
    fleet: Fleet,
    run: Run,
    clients: Sequence[ClientId] | None = None,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    also: Mapping[str, bool] = NONE,
) -> dict[str, float]:
    """Evaluate the current model at all clients, or these: mean, worst client and decile, percentiles.

    Every client counts the same. `also` are further metrics, each with whether higher is better. Usable in any flow,
    every few rounds:

        for done in train(run, fleet, ...):
            if run.round % 10 == 0:
                done.row.update(across_clients(fleet, run))
            yield done

    >>> import numpy as np
    >>> from mutirao import LocalFleet, Reply
    >>> def answer(request, site):
    ...     return Reply({}, metrics={"accuracy": site.data}, n=10)
    >>> found = across_clients(LocalFleet(answer, {"ana": 0.9, "bia": 0.5}), Run({"w": np.zeros(1)}))
    >>> found["accuracy_mean"], found["accuracy_worst"]
    (0.7, 0.5)
    """
    names = list(fleet.clients() if clients is None else clients)
    config = {"seed": run.seed, "round": run.round}
    reported: dict[str, list[float]] = {name: [] for name in (metric, *also)}
    for start in range(0, len(names), AT_ONCE):
        requests = {c: Request("evaluate", run.arrays, config) for c in names[start : start + AT_ONCE]}
        answers = sift(fleet.ask(requests), fault_of_extras)
        for name, values in reported.items():
            values += [float(r.metrics[name]) for r in answers.replies.values() if name in r.metrics]
    if not any(reported.values()):
        raise ConfigError(f"none of {len(names)} clients answered with {metric!r}; does the task evaluate it?")
    directions = {**also, metric: higher_is_better}
    summary: dict[str, float] = {}
    for name, values in reported.items():
        summary |= summarise(name, values, directions[name])
    return summary


def weighted_client_metrics(
    fleet: Fleet, run: Run, metrics: Collection[str], size_cap: float = SIZE_CAP
) -> dict[str, float]:
    """Evaluate the current model on the clients' own test data, where the server has none; the weighted means.

    Weights are numbers of samples, bounded by `size_cap`; of `rmse` squares are averaged. For accuracy, losses and
    errors this is the metric of all test data together; for AUC, F1, balanced accuracy and R2 a mean over clients.
    """
    requests = {c: Request("evaluate", run.arrays, {"seed": run.seed, "round": run.round}) for c in fleet.clients()}
    replies = sift(fleet.ask(requests), fault_of_extras).replies
    sizes = {c: r.n for c, r in replies.items()}
    sizes |= cap_sizes(sizes, run.roster, size_cap)
    means = {}
    for name in metrics:
        reported = [(sizes[c], float(r.metrics[name])) for c, r in sorted(replies.items()) if name in r.metrics]
        if reported:
            # Squared errors can be averaged over samples, their roots cannot.
            power = 2 if name == "rmse" else 1
            total = sum(n for n, _ in reported)
            means[name] = (sum(n * value**power for n, value in reported) / total) ** (1 / power)
    return means


def summarise(metric: str, values: Sequence[float], higher_is_better: bool = True) -> dict[str, float]:
    """The number of clients, their mean, the worst, the mean of the worst tenth, and the 10th, 50th, 90th percentile.

    >>> found = summarise("accuracy", [0.5, 0.9])
    >>> found["accuracy_mean"], found["accuracy_worst"], found["accuracy_p90"]
    (0.7, 0.5, 0.86)
    """
    if not values:
        return {}
    worst = min(values)
    worst_first = np.sort(values)
    if not higher_is_better:
        worst = max(values)
        worst_first = -np.sort(-np.asarray(values))
    low, middle, high = np.percentile(values, [10, 50, 90])
    return {
        f"{metric}_clients": float(len(values)),
        f"{metric}_mean": float(np.mean(values)),
        f"{metric}_worst": float(worst),
        f"{metric}_worst_decile": float(worst_first[: -(-len(values) // 10)].mean()),
        f"{metric}_p10": float(low),
        f"{metric}_p50": float(middle),
        f"{metric}_p90": float(high),
    }
