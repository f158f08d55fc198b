"""`mutirao partition`: how heterogeneous the clients of a partition are, as figures and a picture."""

from pathlib import Path
from typing import Any

import click

from mutirao.cli.options import FILE, JSON, Assignments, CommandGroup, allow_local_imports, print_result, settings
from mutirao.errors import ConfigError


@click.group(cls=CommandGroup)
def partition() -> None:
    """Show a partition's heterogeneity.

    Example: mutirao partition show --set partition=dirichlet --set partition.alpha=0.1
    """


@partition.command("show")
@settings("Any setting of the recipe, such as data=cifar10, partition=quantity or clients=10.")
@click.option("--recipe", default="quickstart", show_default=True, help="Recipe with the data and defaults.")
@click.option("--out", type=FILE, help="Picture to write: .png, .svg or .pdf; the counts go beside it as .csv.")
@click.option(
    "--kind", type=click.Choice(["bars", "bubbles"]), default="bars", show_default=True, help="Kind of picture."
)
@JSON
def partition_show(sets: Assignments, recipe: str, out: Path | None, kind: str, as_json: bool) -> None:
    """Measure and draw how non-IID the clients of a partition are.

    Nothing is trained.

    \b
    Examples:
      mutirao partition show
      mutirao partition show --set partition=quantity --set clients=10 --out sizes.png
      mutirao partition show --recipe cifar10 --set data=cifar10 --set partition=k_classes --kind bubbles --out two.png
    """
    from mutirao.config import resolve
    from mutirao.experiments.task import find

    allow_local_imports(recipe, [value for _, value in sets])
    definition = find(recipe)
    config = resolve(definition.config, {}, sets)
    task = definition.prepare(config)
    summary = summary_of(recipe, task)
    part = {"name": config.partition.name, **config.partition.settings}
    figures = summary.figures()
    if task.noise:
        figures["noise"] = [min(task.noise), max(task.noise)]
    if out is not None:
        draw_summary(summary, kind, out)
    title = f"{recipe}: data={config.data}, partition={config.partition.name}"
    settings_text = ", ".join(f"{key}={value}" for key, value in config.partition.settings.items())
    if settings_text:
        title += f" ({settings_text})"
    lines = [title, *describe(figures)]
    if out is not None:
        lines.append(f"written: {out}")
    print_result(
        {"recipe": recipe, "data": config.data, "partition": part, "seed": config.seed, **figures}, as_json, *lines
    )


def summary_of(recipe: str, task: Any) -> Any:
    """The partition's summary, which the task keeps for its report."""
    for picture in task.exhibits.pictures.values():
        if picture.kind == "partition" and (found := picture.data(None)) is not None:
            return found
    raise ConfigError(f"--recipe: {recipe!r} has no partition of labelled samples with these settings")


def draw_summary(summary: Any, kind: str, out: Path) -> None:
    """Write the picture, and the table beside it."""
    from mutirao.report.plots import draw_bubbles, draw_partition

    if kind == "bubbles":
        draw_bubbles(summary, out.expanduser())
    else:
        draw_partition(summary, out.expanduser())


def describe(figures: dict[str, Any]) -> list[str]:
    """The figures as lines of text, each with what it means."""
    f = figures
    unused = f", {f['left_out']:,} left out" if f["left_out"] else ""
    ratio = "infinite, as a client has none" if f["size_ratio"] is None else f"{f['size_ratio']:.4g}"
    lines = [
        f"{f['clients']:,} clients, {f['samples']:,} samples of {f['classes']:,} classes{unused}",
        f"samples a client: {f['smallest']:,} to {f['largest']:,}, median {f['median']:,g}; "
        f"largest by smallest {ratio}, Gini {f['gini']:.3f}",
        f"classes a client: {f['classes_fewest']} to {f['classes_most']}, mean {f['classes_mean']:.2f}",
        f"label entropy: {f['label_entropy']:.3f} bits a client on average, of {f['label_entropy_most']:.3f} at most",
        f"earth mover's distance: {f['emd']:.3f} on average, {f['emd_largest']:.3f} at most (sum over classes of "
        "|p_client - p|)",
        f"total variation: {f['total_variation']:.3f} on average (half of that)",
    ]
    if "noise" in f:
        low, high = f["noise"]
        lines.append(f"noise on inputs: standard deviation {low:.3g} to {high:.3g}, of pictures from 0 to 1")
    return lines
