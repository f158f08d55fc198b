"""Make the pictures of docs/gallery.md from real runs: `python scripts/gallery.py [FOLDER FOR THE RUNS]`.

Needs the extra `dash`, Playwright and a Chromium; runs that are already in the folder are used again.
"""

import io
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent.parent
OUT = HERE / "docs" / "images" / "gallery"
MUTIRAO = [sys.executable, "-m", "mutirao.cli"]
RUNS = {
    "quickstart": ["run", "quickstart"],
    "adam": ["run", "quickstart", "--set", "aggregate=fedadam", "--set", "aggregate.lr=0.03"],
    "skewed": ["run", "quickstart", "--set", "partition.alpha=0.1"],
    "ranking": ["run", "ranking"],
    "study": ["study", str(HERE / "studies" / "quickstart.toml"), "--set", "seeds=3"],
}
FIGURES = {"labels": "quickstart", "bands": "study", "best": "study", "weights": "ranking", "histogram": "quickstart"}


def main() -> None:
    """Make the runs, then look at them as a person would."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(tempfile.mkdtemp())
    OUT.mkdir(parents=True, exist_ok=True)
    for name, words in RUNS.items():
        if not (folder / name / "report.html").exists():
            subprocess.run([*MUTIRAO, *words, "--out", str(folder / name)], check=True)
    for kind, name in FIGURES.items():
        out = OUT / f"figure-{kind}.{'png' if kind == 'weights' else 'svg'}"  # a thousand dots are smaller as pixels
        subprocess.run([*MUTIRAO, "plot", str(folder / name), kind, "--out", str(out)], check=True)
    with sync_playwright() as driver:
        path = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        reports(browser, folder)
        live(browser, folder)
        browser.close()


def reports(browser: Browser, folder: Path) -> None:
    """Reports of a run and of a study: light, dark, on a phone."""
    for name, run, width, height, colours in (
        ("report-light", "ranking", 1180, 1500, "light"),
        ("report-dark", "ranking", 1180, 1500, "dark"),
        ("report-phone", "quickstart", 390, 1500, "light"),
        ("report-study", "study", 1180, 1250, "light"),
    ):
        page = opened(browser, width, height, colours)
        page.goto((folder / run / "report.html").resolve().as_uri())
        page.wait_for_selector("figure svg")
        keep(page, name)


def live(browser: Browser, folder: Path) -> None:
    """The live page: all runs, one, several compared, a study."""
    server = subprocess.Popen([*MUTIRAO, "dash", str(folder), "--no-open"], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].strip()
        seeds = [
            f"study/cells/{method}/seed{seed}" for method in ("fedavg", "fedavgm", "fedmedian") for seed in range(3)
        ]
        runs = "&".join(f"id={quote(run, safe='')}" for run in seeds)
        places = [
            ("dash", 1280, 720, "runs?cells=1&sort=best", "tr[data-id]"),
            ("dash-run", 1280, 1000, "run?id=adam&smooth=0.6", "#curves svg"),
            ("dash-compare", 1280, 900, f"compare?{runs}&smooth=0.5", "#compared svg"),
            ("dash-study", 1280, 800, "study?id=study", "tr[data-id]"),
            ("dash-phone", 390, 844, "runs?cells=1&sort=best", "tr[data-id]"),
        ]
        for colours in ("light", "dark"):
            for name, width, height, place, sign in places:
                page = opened(browser, width, height, colours)
                page.goto(f"{address}#/{place}")
                page.wait_for_selector(sign)
                keep(page, f"{name}-{colours}")
    finally:
        server.terminate()
        server.wait()


def opened(browser: Browser, width: int, height: int, colours: str) -> Page:
    """A page of that size and those colours."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=colours)  # type: ignore[arg-type]
    return context.new_page()


def keep(page: Page, name: str) -> None:
    """Save what is seen with few colours: small files, and no difference to the eye."""
    time.sleep(0.5)
    picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB").quantize(128)
    picture.save(OUT / f"{name}.png", optimize=True)
    print(OUT / f"{name}.png", (OUT / f"{name}.png").stat().st_size)
    page.context.clear_cookies()


if __name__ == "__main__":
    main()
