"""Build the image and run compose.demo.yaml with no Docker engine and no registry: Debian's buildah and debootstrap.

    apt-get install buildah debootstrap
    .venv/bin/python deploy/build.py /var/tmp/mutirao-image

As root, on Debian or Ubuntu. Containers are chroots on the host's network with their own process numbers, volumes are
folders. What follows `--` goes to `buildah build`, such as `-- --secret id=pip,src=/etc/pip.conf`.
"""

import argparse
import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[1]
COMPOSE = ROOT / "deploy" / "compose.demo.yaml"
BASE, IMAGE = "mutirao-base", "mutirao"
PYTHON = "python3,python3-venv,ca-certificates"  # what a base needs besides Debian's minimum
NEEDLESS = ("usr/share/doc", "usr/share/man", "usr/share/locale", "var/cache/apt", "var/lib/apt/lists")
OWN_NUMBERS = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")  # a container sees its own processes alone


class Builder:
    """buildah, with images and containers in a folder of its own."""

    def __init__(self, folder: Path, driver: str) -> None:
        self.folder = folder
        store = ("--root", str(folder / "store"), "--runroot", str(folder / "run"))
        self.words = ["buildah", *store, "--storage-driver", driver]

    def __call__(self, *words: str) -> str:
        """What a command answers."""
        return subprocess.run([*self.words, *words], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()

    def images(self) -> dict[str, int]:
        """The images that are there, with their sizes in bytes."""
        found = json.loads(self("images", "--json") or "[]") or []
        ids = {
            name.rpartition("/")[2].partition(":")[0]: image["id"] for image in found for name in image["names"] or ()
        }
        return {name: sum(size for size in self.layers(number)) for name, number in ids.items()}

    def layers(self, image: str) -> list[int]:
        """The bytes of each layer, the lowest first."""
        manifest = json.loads(json.loads(self("inspect", "--type", "image", image))["Manifest"])
        return [layer["size"] for layer in manifest["layers"]]

    def make_base(self, suite: str) -> None:
        """Debian with Python, in place of an image of a registry."""
        tree = self.folder / "base"
        if not (tree / "usr/bin/python3").exists():
            run("debootstrap", "--variant=minbase", f"--include={PYTHON}", suite, str(tree))
        for name in NEEDLESS:
            shutil.rmtree(tree / name, ignore_errors=True)
        container = self("from", "scratch")
        self("add", "--quiet", container, str(tree), "/")
        self("commit", "--quiet", "--rm", container, BASE)
        shutil.rmtree(tree)

    def make_image(self, more: list[str]) -> None:
        """The image of deploy/Dockerfile. In another format than Docker's its health check would be lost."""
        packages = "BUILD_PACKAGES=gcc libc6-dev python3-dev"
        given = ("--build-arg", f"BASE=localhost/{BASE}", "--build-arg", packages, "--pull-never", *more)
        how = ("--isolation", "chroot", "--network", "host", "--format", "docker")
        run(
            *self.words, "build", *how, *given, "--file", str(ROOT / "deploy" / "Dockerfile"), "--tag", IMAGE, str(ROOT)
        )

    def show_sizes(self) -> None:
        """The image by layers and by packages."""
        base, *own = self.layers(IMAGE)
        for size, what in ((base, "base"), (sum(own), "own layer"), (base + sum(own), "the image")):
            print(f"{size / 1e6:8.0f} MB  {what}")
        container = self("from", IMAGE)
        packages = next(Path(self("mount", container)).glob("opt/mutirao/lib/python3*/site-packages"))
        sizes = {place.name: size_of(place) for place in packages.iterdir()}
        for name, size in sorted(sizes.items(), key=lambda pair: -pair[1])[:12]:
            print(f"{size / 1e6:8.0f} MB  {name}")
        self("rm", container)

    def clear(self) -> None:
        """Take away all that was made here, and the folder if nothing else is in it."""
        self("rm", "--all")
        self("rmi", "--all", "--force")
        for name in ("base", "volumes", "store", "run"):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        if not any(self.folder.iterdir()):
            self.folder.rmdir()


class Service:
    """A service of the compose file: a container that runs its command, and what it says."""

    def __init__(self, build: Builder, name: str, facts: dict[str, Any], width: int) -> None:
        self.build, self.name, self.facts, self.width = build, name, facts, width
        self.container = build("from", "--name", f"demo-{name}", "--add-host", "server:127.0.0.1", IMAGE)
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Begin; its lines come with its name before them."""
        words = ["--isolation", "chroot", "--network", "host", "--add-history=false"]
        if user := self.facts.get("user"):
            words += ["--user", user]
        for key, value in self.facts.get("environment", {}).items():
            words += ["--env", f"{key}={value}"]
        words += [word for volume in self.facts["volumes"] for word in ("--volume", self.bound(volume))]
        inside = [*self.facts["entrypoint"], *self.facts["command"]]
        command = [*OWN_NUMBERS, *self.build.words, "run", *words, self.container, "--", *inside]
        says: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, **says)
        threading.Thread(target=self.pass_on, args=(self.process,), daemon=True).start()

    def bound(self, volume: str) -> str:
        """A volume as a folder of this machine; a new one takes the owner of the image's folder, as with Docker."""
        source, target, *mode = volume.split(":")
        if source.startswith("."):
            return ":".join([str((COMPOSE.parent / source).resolve()), target, *mode])
        place = self.build.folder / "volumes" / source
        if not place.exists():
            place.mkdir(parents=True)
            there = Path(self.build("mount", self.container)) / target.lstrip("/")
            if there.exists():
                os.chown(place, there.stat().st_uid, there.stat().st_gid)
        return ":".join([str(place), target, *mode])

    def pass_on(self, process: subprocess.Popen[str]) -> None:
        """Show what it says."""
        assert process.stdout is not None
        for line in process.stdout:
            print(f"{self.name:<{self.width}} | {line}", end="", flush=True)

    def wait(self) -> int:
        """Its exit code, when it has ended."""
        return self.process.wait() if self.process else 0

    def end(self) -> None:
        """End it and all that it started, and take its container away."""
        if self.process and self.process.poll() is None:
            self.process.kill()  # the first of its processes dies with it, and all others with that one
            self.process.wait()
        self.build("rm", self.container)


def up(build: Builder) -> int:
    """Run all services of the compose file, each after those it waits for; the first exit code that is not 0."""
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    width, begun = max(map(len, services)), dict[str, Service]()
    shutil.rmtree(build.folder / "volumes", ignore_errors=True)  # of the time before
    try:
        for name, facts in services.items():
            begun[name] = Service(build, name, facts, width)
            for other in facts.get("depends_on", {}):
                if code := begun[other].wait():
                    return code
            begun[name].start()
        return next(filter(None, (service.wait() for service in begun.values())), 0)
    finally:
        for service in begun.values():
            service.end()


def show_history(run: Path) -> None:
    """What the rounds were like, and where the rest is."""
    shown = ("round", "replied", "train_loss", "val_acc", "global_acc", "balanced_accuracy", "auc")
    with (run / "history.csv").open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            print("  ".join(f"{key}={row[key][:6]}" for key in shown if row.get(key)))
    print(f"{run / 'report.html'}: {(run / 'report.html').stat().st_size:,} bytes")


def run(*words: str) -> None:
    """Run a command whose words the user sees."""
    subprocess.run(words, check=True)


def size_of(place: Path) -> int:
    """Bytes of a file or of all files in a folder."""
    return sum(f.lstat().st_size for f in (place.rglob("*") if place.is_dir() else [place]) if not f.is_dir())


def main() -> int:
    """Base, image, sizes, demonstration; then everything but what was asked for is taken away."""
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for images, containers and volumes; some 10 GB")
    parser.add_argument("--suite", default="bookworm", help="the Debian of the base [bookworm]")
    parser.add_argument("--driver", default="overlay", help="buildah's storage driver; vfs is slow, and works anywhere")
    parser.add_argument(
        "--keep", action="store_true", help="keep base, image and volumes; the first two are used again"
    )
    options = parser.parse_args(sys.argv[1:end])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # whoever ends this ends the containers, too
    options.folder.mkdir(parents=True, exist_ok=True)
    build = Builder(options.folder.resolve(), options.driver)
    began = time.monotonic()
    try:
        if BASE not in build.images():
            build.make_base(options.suite)
        if IMAGE not in build.images():
            build.make_image(sys.argv[end + 1 :])
        print(f"the image is there after {time.monotonic() - began:.0f} s")
        build.show_sizes()
        began = time.monotonic()
        code = up(build)
        print(f"the demonstration took {time.monotonic() - began:.0f} s, exit code {code}")
        show_history(build.folder / "volumes" / "server" / "runs" / "demo")
        return code
    finally:
        if not options.keep:
            build.clear()


if __name__ == "__main__":
    sys.exit(main())
