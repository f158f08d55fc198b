"""What each container of compose.demo.yaml does: the commands of the documentation, one after the other.

`post` is the volume by which they send each other what people would send by mail: the authority's certificate and the
sites' public keys. Each hospital has its own folder and its own smears, and sees no other's.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HOME, DATA, POST = Path("/srv/mutirao"), Path("/data"), Path("/post")
HOSPITALS = {"recife": "client_1", "natal": "client_2", "fortaleza": "client_3"}  # and what the recipe calls them
SLIDES, SIDE = 4, 4096  # of a laboratory, one of them for the test; and pixels of a slide's side
ROUNDS = 10


def mutirao(*words: object) -> None:
    """Run a command of ours, and show it."""
    command = ["mutirao", *map(str, words)]
    print("$", *command, flush=True)
    subprocess.run(command, check=True)


def smears() -> None:
    """Synthetic smears of three laboratories: each hospital gets its own, the server those for the test."""
    from mutirao.systems.cytology.slides.synthetic_slides import make_laboratories

    for old in POST.iterdir():
        old.unlink()
    POST.chmod(0o777)  # the others are not root
    made = make_laboratories(len(HOSPITALS), SLIDES, SIDE, seed=0)
    for name, client in HOSPITALS.items():
        hand_over(made / client, DATA / name)
    hand_over(made / "global_test", DATA / "server")


def hand_over(pictures: Path, place: Path) -> None:
    """Copy a folder of pictures into a volume, unless it is there."""
    if not (place / pictures.name).exists():
        shutil.copytree(pictures, place / pictures.name)
    print(f"{place.name}: {sum(1 for _ in place.rglob('*.jpg'))} tiles", flush=True)


def serve() -> None:
    """Found the server, admit the hospitals, train, and write the report."""
    if not (HOME / "site.toml").exists():
        mutirao("site", "init", "server", HOME, "--host", "server")
    try:
        mutirao("site", "up", HOME)
        send(HOME / "ca.crt")
        for name in HOSPITALS:
            mutirao("site", "admit", HOME, await_post(f"{name}.pub"))
        out = fresh(HOME / "runs" / "demo")
        settings = ("--set", f"data={DATA}", "--set", f"clients={len(HOSPITALS)}", "--set", f"rounds={ROUNDS}")
        mutirao("site", "run", HOME, "cytology", *settings, "--out", out, "--wait")
        mutirao("verify", out)
    finally:
        (POST / "done").touch()
        mutirao("site", "down", HOME)


def join(name: str) -> None:
    """Found a hospital, let it take part in this recipe, and stay until the server is done."""
    ca = await_post("ca.crt")
    if not (HOME / "site.toml").exists():
        about = ("--name", name, "--client", HOSPITALS[name], "--superlink", "server:9092", "--ca", ca)
        mutirao("site", "init", "site", HOME, *about, "--data", DATA, "--recipe", "cytology")
    send(HOME / f"{name}.pub")
    mutirao("site", "up", HOME)
    try:
        await_post("done")
    finally:
        mutirao("site", "down", HOME)


def send(file: Path) -> None:
    """Put a file where the others find it, whole or not at all."""
    part = POST / f".{file.name}"
    shutil.copyfile(file, part)
    part.replace(POST / file.name)


def await_post(name: str) -> Path:
    """Wait until another has sent this file."""
    while not (POST / name).exists():
        time.sleep(0.5)
    return POST / name


def fresh(folder: Path) -> Path:
    """This folder, or the next one with a number that is not taken: each `up` is a run of its own."""
    names = (folder if k == 1 else folder.with_name(f"{folder.name}-{k}") for k in range(1, 1000))
    return next(name for name in names if not name.exists())


ROLES: dict[str, Callable[[], None]] = {"smears": smears, "server": serve}

if __name__ == "__main__":
    role = sys.argv[1]
    try:
        ROLES[role]() if role in ROLES else join(role)
    except subprocess.CalledProcessError as error:  # it has said itself what is wrong
        sys.exit(error.returncode)
