"""`mutirao site policy`, `hash` and `check`: what a site does with its policy."""

from pathlib import Path

import click

from mutirao.cli.options import FILE, JSON, Assignments, print_result, settings
from mutirao.cli.site import site

__all__ = ["site"]  # the group, with these commands


@site.command()
@click.option("--recipe", "recipes", multiple=True, help="A recipe to allow; may be given many times.")
@settings("A setting that all sites agreed on; the policy pins it.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write [default: print it].")
def policy(recipes: tuple[str, ...], sets: Assignments, out: Path | None) -> None:
    """Write a policy that allows what a recipe needs.

    Each line is explained. Without --recipe the policy allows nothing. A recipe is pinned to its installed content and
    its settings, with the values of --set.

    \b
    Examples:
      mutirao site policy --recipe quickstart --out policy.toml
      mutirao site policy --recipe cytology --set data=/srv/pictures --out policy.toml
    """
    from mutirao.deploy.policy.content_hash import check_recipe
    from mutirao.deploy.policy.policy_templates import allows_anything, policy_for
    from mutirao.errors import ConfigError
    from mutirao.io import write_whole

    for recipe in recipes:
        check_recipe(recipe)
    text = policy_for(recipes, sets)
    if out is None:
        click.echo(text, nl=False)
        return
    if out.exists():
        raise ConfigError(f"{out} is there already; choose another --out")
    write_whole(out, text)
    left = (
        f"it lets leave what {', '.join(recipes)} needs"
        if allows_anything(text)
        else "nothing leaves until you allow it"
    )
    click.echo(f"written: {out}; {left}: read it line by line")


@site.command("hash")
@click.argument("recipe")
@click.option("--architecture", is_flag=True, help="Print the digest of the model's architecture instead.")
@settings("Change a setting of the recipe, for --architecture.")
def hash_command(recipe: str, architecture: bool, sets: Assignments) -> None:
    """Print the content hash of an installed recipe, which policies pin.

    \b
    Examples:
      mutirao site hash quickstart
      mutirao site hash quickstart --architecture --set hidden=128
    """
    from mutirao.deploy.policy.content_hash import check_recipe, content_hash
    from mutirao.deploy.policy.pins import model_of

    check_recipe(recipe)
    click.echo(model_of(recipe, sets) if architecture else content_hash(recipe))


@site.command()
@click.argument("path", type=FILE, metavar="POLICY.toml")
@JSON
def check(path: Path, as_json: bool) -> None:
    """Explain what a policy allows and how much privacy budget is spent.

    Example: mutirao site check policy.toml
    """
    from mutirao.deploy.policy.description import describe_policy
    from mutirao.deploy.policy.rules import load_policy

    lines = describe_policy(load_policy(path))
    print_result(lines, as_json, *(f"{k:<18} {v}" for k, v in lines.items()))
