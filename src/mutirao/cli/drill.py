"""`mutirao drill`: choose troubles, see them happen to a real federation, read what came of them."""

import sys
from pathlib import Path

import click

from mutirao.cli.options import FILE, FOLDER, JSON, tell

ANYWHERE = {"leak", "ratings"}  # what is worked out in this process


@click.command()
@click.argument("trials", nargs=-1)
@click.option("--list", "listing", is_flag=True, help="Say what can be drilled.")
@click.option("--kills", default=4, show_default=True, help="How many processes of deployed runs are killed.")
@click.option("--in-process", default=20, show_default=True, help="How often runs on the local fleet are killed.")
@click.option("--seed", default=0, show_default=True, help="Of the random moments.")
@click.option("--folder", type=FOLDER, help="Keep everything here.")
@click.option("--policy", type=FILE, help="leak: the policy to try [default: a new one, with training allowed].")
@click.option("--recipe", default="quickstart", show_default=True, help="leak: the recipe whose client is attacked.")
@click.option(
    "--noise", type=click.FloatRange(1e-9), default=1.0, show_default=True, help="leak: the noise to compare."
)
@click.option("--data", default="generated", show_default=True, help="ratings: whose, as the recsys recipe takes them.")
@JSON
def drill(
    trials: tuple[str, ...],
    listing: bool,
    kills: int,
    in_process: int,
    seed: int,
    folder: Path | None,
    policy: Path | None,
    recipe: str,
    noise: float,
    data: str,
    as_json: bool,
) -> None:
    """Break a small federation on this machine on purpose, and see whether it ends as if nobody had.

    \b
    Examples:
      mutirao drill --list
      mutirao drill kills --kills 8
      mutirao drill cut disk clock garbage
      mutirao drill leak --policy policy.toml --folder drilled
      mutirao drill ratings --data ml-100k --folder drilled
      mutirao drill                       all of them: half an hour
    """
    from dataclasses import asdict

    from mutirao.deploy.drill.trials import TRIALS

    if listing:
        for name, text in TRIALS.items():
            click.echo(f"{name:<12} {text}")
        return
    from mutirao.deploy.systems import need_linux

    if not trials or set(trials) - ANYWHERE:
        need_linux("mutirao drill, but for leak and ratings,")

    from mutirao.deploy.drill.course import run_trials
    from mutirao.deploy.drill.leak import Leaking

    made, leaking = [], Leaking(recipe, policy, noise, seed=seed)
    for trial in run_trials(trials or tuple(TRIALS), folder, kills, in_process, seed, leaking, data):
        made.append(trial)
        if not as_json:
            click.echo(f"{trial.verdict:<8} {trial.name:<12} {trial.seconds:6.0f} s  {trial.happened}")
            for line in trial.facts.get("table", ()):
                click.echo(f"    {line}")
    bad, skipped = sum(trial.verdict == "BAD" for trial in made), sum(trial.skipped for trial in made)
    said = f"{len(made)} trials, {sum(trial.kills for trial in made)} kills: {bad} bad, {skipped} not run"
    tell([asdict(trial) | {"verdict": trial.verdict} for trial in made], as_json, said)
    sys.exit(1 if bad else 0)
