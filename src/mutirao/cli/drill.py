"""`mutirao drill`: privacy attacks on your federation's own updates, run on this machine."""

import sys
from pathlib import Path

import click

from mutirao.cli.options import FILE, FOLDER, JSON, print_result


@click.command()
@click.argument("trials", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="List the attacks.")
@click.option("--seed", default=0, show_default=True, help="Random seed.")
@click.option("--folder", type=FOLDER, help="Folder for the results.")
@click.option("--policy", type=FILE, help="leak: the policy to test [default: a new one that allows training].")
@click.option("--recipe", default="quickstart", show_default=True, help="leak: the recipe whose client is attacked.")
@click.option(
    "--noise", type=click.FloatRange(1e-9), default=1.0, show_default=True, help="leak: the noise to compare."
)
@click.option("--data", default="generated", show_default=True, help="ratings: data, as for the recsys recipe.")
@JSON
def drill(
    trials: tuple[str, ...],
    listing: bool,
    seed: int,
    folder: Path | None,
    policy: Path | None,
    recipe: str,
    noise: float,
    data: str,
    as_json: bool,
) -> None:
    """Attack your own federation's updates: what do they reveal?

    The attacks are those of a curious server; a table shows what each rule of a policy leaves to be read.

    \b
    Examples:
      mutirao drill --list
      mutirao drill leak --policy policy.toml --folder drilled
      mutirao drill ratings --data ml-100k --folder drilled
      mutirao drill                       all of them
    """
    from dataclasses import asdict
    from functools import partial

    from mutirao.privacy.trials import TRIALS, run_trials

    if listing:
        for name, text in TRIALS.items():
            click.echo(f"{name:<12} {text}")
        return

    from mutirao.deploy.leak_drill import LeakDrill, drill_leak
    from mutirao.systems.recsys.rating_drill import RatingDrill, drill_ratings

    drills = {
        "leak": partial(drill_leak, drill=LeakDrill(recipe, policy, noise, seed=seed)),
        "ratings": partial(drill_ratings, drill=RatingDrill(data, seed=seed)),
    }
    done = []
    for trial in run_trials(trials or tuple(TRIALS), folder, drills):
        done.append(trial)
        if not as_json:
            click.echo(f"{trial.verdict:<8} {trial.name:<12} {trial.seconds:6.0f} s  {trial.happened}")
            for line in trial.facts.get("table", ()):
                click.echo(f"    {line}")
    bad = sum(not trial.good for trial in done)
    records = [asdict(trial) | {"verdict": trial.verdict} for trial in done]
    print_result(records, as_json, f"{len(done)} trials: {bad} bad")
    sys.exit(1 if bad else 0)
