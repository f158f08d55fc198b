"""Where SCAFFOLD comes to rest: by which weights c moves, and what becomes of replies that are lost.

    python -m research.resting

Least squares of 20 clients of unequal size, whose optimum is known: the distance to it after 600 rounds, the mean over
five problems. A plain loop in NumPy, in which one thing is changed at a time: `share` moves c by |S| / N p_k, as some
code does, `fixed` by n_k / (N m), which is the same whenever client k has its turn. A reply that is lost has changed
its client's c_k (`kept`), or that is undone when the client is asked again (`undone`), as in our SCAFFOLD.
"""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Problem = list[tuple[Floats, Floats]]
WIDTH, CLIENTS, LR, STEPS, ROUNDS = 4, 20, 0.05, 10, 600


def make_problem(seed: int) -> Problem:
    """Clients that differ in curvature, solution and size."""
    draw, found = np.random.default_rng(seed), []
    for k in range(CLIENTS):
        x = draw.normal(size=(10 + 8 * k, WIDTH)) * draw.uniform(0.3, 1.6, WIDTH)
        found.append((x, x @ draw.normal(size=WIDTH) + draw.normal(size=len(x))))
    return found


def optimum(problem: Problem) -> Floats:
    """Where the mean over all samples is least."""
    hessian = sum((x.T @ x for x, _ in problem), np.zeros((WIDTH, WIDTH)))
    return np.asarray(np.linalg.solve(hessian, sum((x.T @ y for x, y in problem), np.zeros(WIDTH))))


def go(problem: Problem, seed: int, picked: int, lost: float, weights: str, mend: str) -> Floats:
    """The model in the end; `weights` "none" is FedAvg."""
    draw = np.random.default_rng(seed)
    x, c, own = np.zeros(WIDTH), np.zeros(WIDTH), np.zeros((CLIENTS, WIDTH))
    sizes, first = np.array([len(y) for _, y in problem], np.float64), 0.0
    for _ in range(ROUNDS):
        who: list[int] = []
        ends: list[Floats] = []
        changes: list[Floats] = []
        for k in draw.choice(CLIENTS, picked, replace=False):
            inputs, targets = problem[k]
            y = x.copy()
            for _ in range(STEPS):
                slope = inputs.T @ (inputs @ y - targets) / len(targets)
                y = y - LR * (slope + (c - own[k] if weights != "none" else 0.0))
            new = own[k] - c + (x - y) / (STEPS * LR)
            gone = draw.random() < lost
            if not gone:
                who.append(int(k))
                ends.append(y)
                changes.append(new - own[k])
            if not gone or mend == "kept":
                own[k] = new
        if who:
            n = sizes[who]
            first = first or float(n.mean())
            q = len(who) / CLIENTS * n / n.sum() if weights == "share" else n / (CLIENTS * first)
            x = x + (n / n.sum()) @ (np.array(ends) - x)
            c = c + q @ np.array(changes)
    return x


def main() -> None:
    """Print the table."""
    arms = {"FedAvg": ("none", "kept"), "share": ("share", "undone"), "fixed, kept": ("fixed", "kept")}
    arms["fixed, undone"] = ("fixed", "undone")
    print("| clients a round | lost | " + " | ".join(arms) + " |\n|---|---|" + "---|" * len(arms))
    for picked, lost in ((20, 0.0), (10, 0.0), (5, 0.0), (20, 0.05), (5, 0.05), (5, 0.2)):
        gaps = []
        for weights, mend in arms.values():
            ends = [(go(p := make_problem(s), s, picked, lost, weights, mend), optimum(p)) for s in range(5)]
            gaps.append(float(np.mean([np.linalg.norm(end - best) for end, best in ends])))
        print(f"| {picked} of {CLIENTS} | {lost:.0%} | " + " | ".join(f"{gap:.4f}" for gap in gaps) + " |", flush=True)


if __name__ == "__main__":
    main()
