"""`mutirao site`: set up a server or a site, run its processes, and check and approve its policy."""

import sys
import time
from pathlib import Path
from typing import Any, BinaryIO

import click

from mutirao.cli.options import FILE, FOLDER, JSON, Assignments, CommandGroup, print_result, settings

PLACE = click.argument("folder", type=FOLDER)
# These commands need no process and no key, so they run on any system and not only on Linux.
ANYWHERE = {"policy", "hash", "check"}
COLOURS = {"ok": "green", "warn": "yellow", "fail": "red", "skip": None}


@click.group(cls=CommandGroup)
@click.pass_context
def site(context: click.Context) -> None:
    """Set up and run servers and sites.

    \b
    Examples:
      mutirao site rehearse rehearsal --sites 3
      mutirao site init server /srv/mutirao --host fed.example.org
      mutirao site init site /srv/mutirao --name recife --superlink fed.example.org:9092 --ca ca.crt
      mutirao site doctor /srv/mutirao
    """
    from mutirao.deploy.layout import need_linux

    if context.invoked_subcommand not in ANYWHERE:
        need_linux(f"mutirao site {context.invoked_subcommand}")


@site.group()
def init() -> None:
    """Create the folder of a server or a site.

    Existing keys are never replaced.

    Example: mutirao site init server /srv/mutirao --host fed.example.org
    """


@init.command("server")
@PLACE
@click.option("--host", "hosts", multiple=True, help="A name or address of the server; may be given many times.")
@click.option("--port", type=click.IntRange(1, 65535), default=9092, show_default=True, help="Port to listen on.")
@click.option("--listen", default="0.0.0.0", show_default=True, help="Address to listen on.")
@click.option("--name", default="server", show_default=True, help="Name of the server.")
def init_server(folder: Path, hosts: tuple[str, ...], port: int, listen: str, name: str) -> None:
    """Create a server: certificate authority, certificate, configuration.

    Example: mutirao site init server /srv/mutirao --host fed.example.org --host 10.1.2.3
    """
    from mutirao.deploy.keys import certificate_fingerprint
    from mutirao.deploy.provisioning import create_server

    server = create_server(folder, hosts, port, name, listen)
    address = f"{server.hosts[0] if server.hosts else 'ADDRESS'}:{port}"
    click.echo(f"""made: {server.folder}
names in the certificate: {", ".join(server.hosts) or "none but this machine itself: sites need --host"}
keep secret, in a backup:  ca.key server.key (ca.key may live elsewhere: it is needed only to renew)
sites receive from you:    ca.crt and the address {address}
                           fingerprint of ca.crt, to compare by telephone:
                           {certificate_fingerprint(server.ca)}
sites send to you:         NAME.pub, one file, which you take with: mutirao site admit {folder} NAME.pub
next: open TCP port {port} for the sites, then: mutirao site up {folder}""")


@init.command("site")
@PLACE
@click.option("--name", required=True, help="Name of this site.")
@click.option("--client", default="", help="This site's client id in recipes, such as client_1 [default: the name].")
@click.option("--superlink", required=True, metavar="HOST:PORT", help="Address of the server.")
@click.option("--ca", type=click.File("rb"), help="The server's ca.crt; - reads standard input. Can be added later.")
@click.option("--data", default="", help="Folder or file with this site's data.")
@click.option("--recipe", "recipes", multiple=True, help="A recipe to allow; may be given many times.")
@click.option("--task", default="", help="Function from Flower's context to a Task, as our_site:task_of.")
@settings("A setting that all sites agreed on; the policy pins it.")
def init_site(folder: Path, ca: BinaryIO | None, **facts: Any) -> None:
    """Create a site: key pair, policy, configuration.

    With --recipe the policy allows what that recipe needs, explained line by line. Without it, it allows nothing.

    Example: mutirao site init site /srv/mutirao --name recife --superlink fed.example.org:9092 --ca ca.crt
    """
    from mutirao.deploy.keys import certificate_fingerprint, key_fingerprint
    from mutirao.deploy.policy.policy_templates import allows_anything
    from mutirao.deploy.provisioning import create_site

    node = create_site(folder, ca=ca.read() if ca else None, **facts)
    known = f"ca.crt: {certificate_fingerprint(node.ca)}" if node.ca.exists() else f"ca.crt, to be put into {folder}"
    allowed = allows_anything(node.policy_file.read_text(encoding="utf-8"))
    now = f"what {', '.join(facts['recipes'])} needs: read it line by line" if allowed else "nothing"
    click.echo(f"""made: {node.folder}
keep secret, in a backup:  node.key
you send to the server:    {node.public_key}
                           {key_fingerprint(node.public_key)} (compare it by telephone)
you receive from it:       {known}
you decide what leaves:    {node.policy_file} (now: {now})
next: mutirao site doctor {folder}, then: mutirao site up {folder}""")


@site.command()
@PLACE
@click.argument("key", type=click.File("rb"), metavar="NAME.pub")
@click.option("--name", default="", help="Name of the site [default: the file's name].")
@click.option("--client", default="", help="Its client id in recipes [default: as its key says].")
def admit(folder: Path, key: BinaryIO, name: str, client: str) -> None:
    """Admit a site by its public key.

    A running server accepts the site at once.

    Example: mutirao site admit /srv/mutirao recife.pub
    """
    import tempfile

    from mutirao.deploy.keys import client_of_key, key_fingerprint
    from mutirao.deploy.provisioning import store_key
    from mutirao.deploy.server.control_calls import admit as let_in
    from mutirao.errors import ConfigError

    if key.name not in ("-", "<stdin>"):
        kept = store_key(folder, Path(key.name), name, client)
    elif not name:
        raise ConfigError("a key from the input needs --name")
    else:
        with tempfile.TemporaryDirectory() as place:
            copy = Path(place) / f"{name}.pub"
            copy.write_bytes(key.read(65536))
            kept = store_key(folder, copy, name, client)
    let_in(folder, kept)
    click.echo(f"admitted: {kept.stem}, who is {client_of_key(kept)} in recipes; {key_fingerprint(kept)}")


@site.command()
@PLACE
@click.argument("name")
def dismiss(folder: Path, name: str) -> None:
    """Shut a site out: its key is revoked.

    Its next request is refused.

    Example: mutirao site dismiss /srv/mutirao recife
    """
    from mutirao.deploy.server.control_calls import dismiss as shut_out

    shut_out(folder, name)
    click.echo(f"dismissed: {name}; to train again without what it gave: mutirao forget")


@site.command()
@PLACE
@click.option("--host", "hosts", multiple=True, help="A name or address [default: those of the old certificate].")
@click.option("--days", type=click.IntRange(1, 3650), default=730, show_default=True, help="Days until it expires.")
def renew(folder: Path, hosts: tuple[str, ...], days: int) -> None:
    """Renew the server's certificate.

    The certificate authority stays, so sites change nothing.

    Example: mutirao site renew /srv/mutirao
    """
    from mutirao.deploy.provisioning import renew as renew_certificate

    server = renew_certificate(folder, hosts, days)
    click.echo(f"renewed: {server.certificate} for {', '.join(server.hosts)}, {days} days")
    click.echo(f"it is used from the next start on: mutirao site down {folder}; mutirao site up {folder}")


@site.command()
@PLACE
@click.option("--foreground", is_flag=True, help="Run in the foreground: for containers and service managers.")
def up(folder: Path, foreground: bool) -> None:
    """Start a server (Flower's SuperLink) or a site (SuperNode).

    Example: mutirao site up /srv/mutirao
    """
    from mutirao.deploy.layout import Server, load_place
    from mutirao.deploy.processes import (
        exec_process,
        is_connected,
        start_superlink,
        start_supernode,
        wait_until,
        why_not_admitted,
    )
    from mutirao.deploy.server.control_calls import admit as let_in
    from mutirao.errors import MutiraoError

    place = load_place(folder)
    if foreground:
        exec_process(folder)
    if isinstance(place, Server):
        process = start_superlink(folder)
        for key in sorted(place.sites.glob("*.pub")):
            let_in(folder, key)
        click.echo(f"the SuperLink listens on {place.host}:{place.port} (process {process.pid}, {process.log})")
        return
    process = start_supernode(folder)
    wait_until(lambda: is_connected(process) or bool(why_not_admitted(process)) or not process.alive(), 20)
    if not process.alive():
        process.stop()
        raise MutiraoError(f"the SuperNode ended: {process.reason()}; look at it with: mutirao site doctor {folder}")
    state = f"is connected to {place.superlink}" if is_connected(process) else f"goes on trying {place.superlink}"
    click.echo(f"the SuperNode {state} (process {process.pid}, {process.log})")
    if not is_connected(process):
        click.echo(
            f"why: {why_not_admitted(process) or process.last_words()}; look at it with: mutirao site doctor {folder}"
        )


@site.command()
@PLACE
def down(folder: Path) -> None:
    """Stop a server or a site.

    Example: mutirao site down /srv/mutirao
    """
    from mutirao.deploy.layout import load_place
    from mutirao.deploy.processes import stop

    place = load_place(folder)
    click.echo(f"the {place.process} has ended" if stop(folder) else f"the {place.process} did not run")


@site.command()
@PLACE
@JSON
def status(folder: Path, as_json: bool) -> None:
    """Show whether a server or site runs and is connected.

    The exit code is 1 if not.

    Example: mutirao site status /srv/mutirao
    """
    from mutirao.deploy.admin.facts import facts_as_lines, overview, why_not_working
    from mutirao.deploy.layout import Server, load_place
    from mutirao.deploy.processes import running

    place = load_place(folder)
    process = running(folder)
    why = why_not_working(place, process) if process is not None else "it does not run"
    works = not why
    facts = {"role": place.role, "name": place.name, "runs": process is not None, "works": works, "why": why}
    said = f"the {place.process} does not run; start it with: mutirao site up {folder}"
    if process is not None:
        facts |= {"pid": process.pid, "since": process.since(), "log": str(process.log)}
        words = ("does not answer", "answers") if isinstance(place, Server) else ("is not connected", "is connected")
        since = f"since {process.since()}, process {process.pid}, {process.log}"
        said = f"the {place.process} runs and {words[works]}{why and f': {why}'} ({since})"
    more = overview(place, works)
    print_result(facts | more, as_json, said, *facts_as_lines(more))
    sys.exit(0 if works else 1)


@site.command()
@PLACE
@click.option("--off", is_flag=True, help="Answer requests again.")
def pause(folder: Path, off: bool) -> None:
    """Refuse all requests to a site for a while.

    The audit trail names the rule `paused`.

    \b
    Examples:
      mutirao site pause /srv/mutirao
      mutirao site pause /srv/mutirao --off
    """
    from mutirao.deploy.site.pause import set_pause as turn

    turned = "" if turn(folder, not off) else " already"
    click.echo(f"{folder} answers again{turned}" if off else f"{folder} is paused{turned}: nothing is answered")


@site.command()
@PLACE
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port [default: any free one].")
@click.option("--open/--no-open", "browse", default=None, help="Open a browser [default: on a terminal].")
def admin(folder: Path, port: int, browse: bool | None) -> None:
    """Open the admin page of a server or a site.

    A server's page shows its sites, runs and refused requests, and can admit and dismiss sites. A site's page shows the
    requests and what was sent, and can pause the site. It can be reached from this machine alone; Ctrl-C ends it.

    Example: mutirao site admin /srv/mutirao
    """
    from contextlib import nullcontext

    from mutirao.dashboard.serving import needing_packages, serve_page
    from mutirao.deploy.layout import load_place

    place = load_place(folder)
    with needing_packages():
        from mutirao.deploy.admin.admin_page import make_app

    def say(address: str) -> None:
        click.echo(f"{folder} is shown at {address}")
        if browse or (browse is None and sys.stdout.isatty()):
            click.launch(address)

    serve_page(lambda token, hosts: nullcontext(make_app(place, token, hosts)), "127.0.0.1", port, say)


@site.command()
@PLACE
@JSON
def doctor(folder: Path, as_json: bool) -> None:
    """Check the setup of a server or a site.

    Every problem comes with a remedy, and the exit code is then 1.

    Example: mutirao site doctor /srv/mutirao
    """
    from dataclasses import asdict

    from mutirao.deploy.doctor import examine, is_healthy

    findings = examine(folder)
    width = max(len(f.check) for f in findings)
    lines = []
    for f in findings:
        lines.append(f"{click.style(f'{f.state:<4}', fg=COLOURS[f.state])}  {f.check:<{width}}  {f.text}")
        if f.remedy:
            lines.append(f"{'':<6}{'':<{width}}  -> {f.remedy}")
    print_result({"ok": is_healthy(findings), "checks": [asdict(f) for f in findings]}, as_json, *lines)
    sys.exit(0 if is_healthy(findings) else 1)


@site.command("run")
@PLACE
@click.argument("recipe")
@settings("Change a setting of the recipe.")
@click.option("--out", type=FOLDER, help="Folder [default: FOLDER/runs/RECIPE].")
@click.option("--resume", is_flag=True, help="Continue the run in that folder.")
@click.option("--timeout", default=600.0, show_default=True, help="Seconds to wait for a site's reply.")
@click.option("--wait", is_flag=True, help="Wait for the end and show the rounds.")
@click.option("--keep", is_flag=True, help="Wait for the end, and resume the run if its server process dies.")
def run_command(
    folder: Path, recipe: str, sets: Assignments, out: Path | None, resume: bool, timeout: float, wait: bool, keep: bool
) -> None:
    """Run a recipe on the connected sites.

    Example: mutirao site run /srv/mutirao quickstart --set rounds=3 --set clients=3 --wait
    """
    from mutirao.deploy.layout import load_server
    from mutirao.deploy.server.submission import RoundPrinter, absolute_paths, check_run, follow, run_folder, submit

    since = time.time()
    load_server(folder)
    place = run_folder(folder, recipe, out)
    sets = absolute_paths(sets)
    check_run(recipe, sets, place, resume)
    if keep:
        from mutirao.deploy.server.supervisor import supervise

        done = supervise(folder, recipe, sets, place, timeout, meanwhile=RoundPrinter(place, since, click.echo))
        click.echo(f"finished in {done['flower_runs']} Flower runs; look at {place / 'report.html'}")
        return
    number = submit(folder, recipe, sets, place, resume, timeout)
    click.echo(f"Flower's run {number}; it fills {place}")
    if wait:
        follow(folder, number, place, since, float("inf"), click.echo)
        click.echo(f"finished; look at {place / 'report.html'}")


@site.command("rehearse")
@click.argument("folder", type=FOLDER, default="rehearsal")
@click.option("--sites", type=click.IntRange(2, 20), default=3, show_default=True, help="Number of sites.")
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True, help="Number of rounds.")
@click.option("--recipe", default="quickstart", show_default=True, help="Recipe to run.")
@settings("Change a setting of the recipe.")
@JSON
def rehearse_command(folder: Path, sites: int, rounds: int, recipe: str, sets: Assignments, as_json: bool) -> None:
    """Rehearse a whole federation on this machine.

    It starts a server and sites as real processes with TLS, keys and policies, runs a few rounds and writes a report.

    Example: mutirao site rehearse --sites 3
    """
    from mutirao.deploy.rehearsal import rehearse

    report = rehearse(folder, sites, rounds, recipe, sets, lambda line: click.echo(line, err=as_json))
    said = f"{report['seconds']} s in all; {folder / 'run' / 'report.html'}, {folder / 'rehearsal.json'}"
    print_result(report, as_json, said)
    sys.exit(0 if report["ok"] else 1)


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
    from mutirao.deploy.policy.pins import check_recipe
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
    from mutirao.deploy.policy.pins import check_recipe, content_hash, model_of

    check_recipe(recipe)
    click.echo(model_of(recipe, sets) if architecture else content_hash(recipe))


@site.command()
@click.argument("path", type=FILE, metavar="POLICY.toml")
@JSON
def check(path: Path, as_json: bool) -> None:
    """Explain what a policy allows and how much privacy budget is spent.

    Example: mutirao site check policy.toml
    """
    from mutirao.deploy.policy.policy_templates import describe_policy
    from mutirao.deploy.policy.rules import load_policy

    lines = describe_policy(load_policy(path))
    print_result(lines, as_json, *(f"{k:<18} {v}" for k, v in lines.items()))
