"""`mutirao record`: a record of processing, written from a run."""

from pathlib import Path

import click

from mutirao.cli.options import FILE, TRUST, CodeConsent, allow_local_imports, print_result
from mutirao.errors import ConfigError


@click.command()
@click.argument("folder", type=FILE)
@click.option("--out", type=FILE, help="File to write [default: print it].")
@click.option("--lang", type=click.Choice(["en", "pt"]), default="en", show_default=True, help="English or Portuguese.")
@click.option("--json", "as_json", is_flag=True, help="Output the facts as JSON.")
@TRUST
def record(folder: Path, out: Path | None, lang: str, as_json: bool, trust: CodeConsent) -> None:
    """Write a run's record of processing activities (LGPD, GDPR).

    It covers Art. 37 of the LGPD and Art. 30 of the GDPR, with blanks for what a run cannot know.

    \b
    Examples:
      mutirao record runs/recsys --out record.md
      mutirao record runs/recsys --lang pt --out registro.md
    """
    from mutirao.deploy.processing_record import record_facts, write_record
    from mutirao.io import write_whole
    from mutirao.runs.trust import names_in_file

    if out is not None and out.exists():
        raise ConfigError(f"{out} is there already, and somebody may have filled it in; choose another --out")
    allow_local_imports(names_in_file(folder / "config.toml"))
    facts = record_facts(folder, trust)
    if out is None:
        print_result(facts, as_json, write_record(facts, lang).rstrip())
        return
    if as_json:
        raise ConfigError("--json prints to the screen; leave --out away")
    write_whole(out, write_record(facts, lang))
    click.echo(f"written: {out}; fill in what is left open")
