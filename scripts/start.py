"""Draw docs/images/start.png, the one picture of the README, from two runs: `python scripts/start.py [FOLDER]`.

Left, who holds which digits; right, what they learn together beside the same model trained on their pooled data.
"""

import csv
import subprocess
import sys
import tempfile
from pathlib import Path

from mutirao.report.plots import BRIGHT, MUTED, add_legend, blank, save, tidy

OUT = Path(__file__).parent.parent / "docs" / "images" / "start.png"
RUNS = {"quickstart": (), "pooled": ("--set", "centralised=true")}


def main() -> None:
    """Make the runs that are not there, and draw them."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    for name, words in RUNS.items():
        if not (folder / name / "summary.json").exists():
            command = [sys.executable, "-m", "mutirao.cli", "run", "quickstart", *words, "--out", str(folder / name)]
            subprocess.run(command, check=True)
    figure, (left, right) = blank(9.6, 3.6, 1, 2)
    counts = [[int(n) for n in row[1:]] for row in table(folder / "quickstart" / "partition.csv")[1:]]
    for client, row in enumerate(counts):
        for digit, n in enumerate(row):
            left.bar(
                client, n, bottom=sum(row[:digit]), color=MUTED[digit], width=1, label=digit if not client else None
            )
    left.set(title="50 clients and the digits each holds", xlabel="client", ylabel="samples", xlim=(-0.5, 49.5))
    add_legend(left, 8, ncols=5, loc="upper left", bbox_to_anchor=(0.02, 1.0), handlelength=0.8, columnspacing=0.8)
    left.set_ylim(0, 1.3 * max(map(sum, counts)))
    for name, title, colour, style in (
        ("pooled", "trained on pooled data (the reference)", "#888888", "--"),
        ("quickstart", "trained by the clients together", BRIGHT[0], "-"),
    ):
        head, *rows = table(folder / name / "history.csv")
        at = head.index("accuracy")
        right.plot(
            [int(r[0]) for r in rows], [float(r[at]) for r in rows], style, color=colour, label=title, linewidth=1.8
        )
    right.set(title="Accuracy on test digits, by round", xlabel="round", xlim=(1, None), ylim=(0, 1))
    add_legend(right, loc="lower right")
    tidy(left, "y")
    tidy(right, "both")
    save(figure, OUT)


def table(path: Path) -> list[list[str]]:
    """A CSV file's rows, its head first."""
    with path.open(newline="") as file:
        return list(csv.reader(file))


if __name__ == "__main__":
    main()
