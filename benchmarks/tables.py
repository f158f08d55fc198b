"""Results as a table for people, on the terminal and in the docs."""

import shlex
from pathlib import Path
from typing import Any

from benchmarks.measure import MODULES

NAMES = {
    "ours": "Mutirão",
    "flower": "Flower simulation",
    "pfl": "pfl-research",
    "blaze": "BlazeFL",
    "plain": "plain loop, 1 thread",
}
HEAD = ["", "round", "start-up", "whole job", "peak memory", "round ×", "job ×", "memory ×", "accuracy"]
BUSY = 0.3  # load a core above which other work disturbs the figures


def table(result: dict[str, Any]) -> str:
    """A Markdown table, columns aligned, that reads well on a terminal too."""
    rows = [HEAD, ["---", *["---:"] * (len(HEAD) - 1)]]
    for name in [n for n in MODULES if n in result]:
        found, ratio = result[name], result["ratios"].get(name)
        if "error" in found:
            rows.append([NAMES[name], "not measured", *[""] * (len(HEAD) - 2)])
            continue
        low, high = found["spread"]["round_s"]
        rows.append(
            [
                NAMES[name],
                f"{seconds(found['round_s'])} ({seconds(low)} to {seconds(high)})",
                seconds(found["startup_s"]),
                seconds(found["total_s"]),
                f"{found['peak_mb']:.0f} MB",
                *(f"{ratio[k]:.1f}" if ratio else "" for k in ("round", "total", "memory")),
                f"{found['accuracy']:.3f}",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = []
    for row in rows:
        figures = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("| " + " | ".join([row[0].ljust(widths[0]), *figures]) + " |")
    return "\n".join(lines)


def seconds(value: float) -> str:
    """A time with three digits that matter."""
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def page(result: dict[str, Any], arguments: list[str]) -> str:
    """The table of a job with all that is needed to judge and to repeat it."""
    job, where, settings = result["job"], result["machine"], result["settings"]
    sizes = f"{settings['samples']} samples each" + (" on average" if settings["unequal"] else "")
    lines = [
        f"**Job {job}**: {settings['about']}, batch {settings['batch_size']}, {settings['per_round']} of "
        f"{settings['clients']} clients a round, {sizes}, one epoch of SGD, {settings['rounds']} rounds.",
        "",
        table(result),
        "",
        f"{where['date']}, {where['cpu']}, {where['cores']} cores, {where['memory_gb']} GB, {where['system']}, "
        f"Python {where['python']}; {', '.join(f'{k} {v}' for k, v in sorted(result['versions'].items()))}. "
        f"Repetitions: {result['repetitions']}; the median, in brackets the smallest and the largest. "
        f"`python -m benchmarks {shlex.join(arguments)}`.",
    ]
    for name in MODULES:
        if "error" in result.get(name, {}):
            lines += ["", f"{NAMES[name]}: {result[name]['error']}."]
    loads = "; ".join(
        f"{NAMES[n]} {', '.join(map(str, result[n]['loads']))}" for n in MODULES if "loads" in result.get(n, {})
    )
    lines += ["", f"Load in the minute before each run, that of the run before included: {loads}."]
    if where["load_before"] > BUSY * where["cores"]:
        lines += ["", f"The machine was busy with other work (load {where['load_before']}): these figures are rough."]
    return "\n".join(lines)


def write_into(document: Path, job: str, text: str) -> None:
    """Replace what stands between the markers of a job."""
    start, stop = f"<!-- results {job} -->", f"<!-- end of results {job} -->"
    before, found, rest = document.read_text(encoding="utf-8").partition(start)
    _, closed, after = rest.partition(stop)
    if not (found and closed):
        raise SystemExit(f"{document} has no place for job {job}: it needs the lines {start} and {stop}")
    document.write_text(f"{before}{start}\n{text}\n{stop}{after}", encoding="utf-8")
