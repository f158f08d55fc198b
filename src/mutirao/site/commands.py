"""`mutirao site`: what a site does with its policy; what starts and watches its processes is to join this group."""

import json
from pathlib import Path

import click


@click.group()
def site() -> None:
    """A site's own say: its policy over what leaves, its account of privacy.

    Example: mutirao site policy --recipe quickstart --out policy.toml
    """


@site.command()
@click.option(
    "--recipe", "recipes", multiple=True, help="A recipe to allow as it is installed; may be given many times."
)
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Where to write it [default: the screen].")
def policy(recipes: tuple[str, ...], out: Path | None) -> None:
    """Write a commented policy that allows nothing yet but the recipes named.

    Example: mutirao site policy --recipe quickstart --out policy.toml
    """
    from mutirao.errors import ConfigError
    from mutirao.files import write_whole
    from mutirao.site.policy import policy_template

    text = policy_template(recipes)
    if out is None:
        click.echo(text, nl=False)
        return
    if out.exists():
        raise ConfigError(f"{out} is there already; choose another --out")
    write_whole(out, text)
    click.echo(f"written: {out}; nothing leaves until you allow it there")


@site.command("hash")
@click.argument("recipe")
def hash_command(recipe: str) -> None:
    """Print the content hash of a recipe as it is installed here.

    Example: mutirao site hash quickstart
    """
    from mutirao.site.content import content_hash

    click.echo(content_hash(recipe))


@site.command()
@click.argument("path", type=click.Path(path_type=Path), metavar="POLICY.toml")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def check(path: Path, as_json: bool) -> None:
    """Read a policy and say what it allows, and what of its privacy budget is spent.

    Example: mutirao site check policy.toml
    """
    from mutirao.site.policy import describe, load_policy

    lines = describe(load_policy(path))
    click.echo(json.dumps(lines, indent=2) if as_json else "\n".join(f"{k:<18} {v}" for k, v in lines.items()))
