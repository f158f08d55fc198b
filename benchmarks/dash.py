"""The live page over 5,000 runs and with runs of 5,000 rounds, in a real browser: `python -m benchmarks.dash`.

Times in the browser are from an action to the second frame after it; a long task is one that holds the page's thread
for more than 50 ms. Needs the extra `dash`, Playwright and a Chromium.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from benchmarks import machine
from benchmarks.shelves import fill

WATCH = """
window.long = [];
const watch = new PerformanceObserver(found => found.getEntries().forEach(e => window.long.push(e.duration)));
watch.observe({ type: "longtask", buffered: true });
"""
ACT = """async ([what, select, value]) => {
  const frames = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
  await frames();
  const node = document.querySelector(select), began = performance.now();
  if (what === "click") node.click();
  else { node.value = value; node.dispatchEvent(new Event("input", { bubbles: true })); }
  await frames();
  return performance.now() - began;
}"""
SCROLL = """async (steps) => {
  const times = []; let before = performance.now();
  for (let i = 0; i < steps; i++) {
    scrollBy(0, 400);
    await new Promise(requestAnimationFrame);
    const now = performance.now(); times.push(now - before); before = now;
  }
  return times;
}"""


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dash", description=__doc__)
    parser.add_argument("--folder", type=Path, help="a folder made before; made anew if there is none")
    parser.add_argument("--runs", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5000, help="of three long runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "runs"
        if not folder.is_dir():
            fill(folder, args.runs, 50)
            fill(folder / "long", 3, args.rounds, "long")
        told = machine.describe()
        print("\n".join(f"| {name} | {value} |" for name, value in measure(folder)))
    print(", ".join(f"{key} {value}" for key, value in told.items()))


def measure(folder: Path) -> Iterator[tuple[str, str]]:
    """Each figure with its name."""
    command = [sys.executable, "-m", "mutirao.cli", "dash", str(folder), "--no-open"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        address = server.stdout.readline().split(" at ")[1].strip()
        yield from ask_server(address, server.pid)
        with sync_playwright() as driver:
            path = shutil.which(os.environ.get("MUTIRAO_BROWSER", "chromium")) or shutil.which("google-chrome")
            browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
            page = browser.new_context(viewport={"width": 1280, "height": 900}).new_page()
            page.add_init_script(WATCH)
            yield from look(page, address)
            browser.close()
        yield "server at rest, share of a core", f"{rest(server.pid):.1%}"
    finally:
        server.terminate()
        server.wait()


def ask_server(address: str, pid: int) -> Iterator[tuple[str, str]]:
    """The list from the server alone: at its start, when it knows all, and when nothing changed."""
    base, _, token = address.partition("/?token=")

    def ask(tag: str = "") -> tuple[float, int, Any, str]:
        headers = {"X-Mutirao-Token": token, **({"If-None-Match": tag} if tag else {})}
        request, began = urllib.request.Request(f"{base}/api/runs", headers=headers), time.perf_counter()
        try:
            with urllib.request.urlopen(request) as answer:
                content = answer.read()
                return time.perf_counter() - began, len(content), json.loads(content), answer.headers.get("etag", "")
        except urllib.error.HTTPError as error:
            return time.perf_counter() - began, 0, {"status": error.code}, ""

    began = time.perf_counter()
    first, _, found, _ = ask()
    yield "first answer of the server", f"{first:.2f} s, {len(found['runs']):,} runs"
    while found.get("left"):
        time.sleep(0.05)
        found = ask()[2]
    yield "until all runs are read", f"{time.perf_counter() - began:.2f} s"
    warm = [ask() for _ in range(5)]
    size = f"{warm[-1][1] / 1e6:.2f} MB"
    yield "the list again", f"{1000 * statistics.median(w[0] for w in warm):.0f} ms, {size}"
    if tag := warm[-1][3]:
        again = [ask(tag) for _ in range(5)]
        yield (
            "the list if nothing changed",
            f"{1000 * statistics.median(w[0] for w in again):.0f} ms, {again[-1][1]} bytes",
        )
    yield "memory of the server", f"{resident(pid):.0f} MB"


def look(page: Page, address: str) -> Iterator[tuple[str, str]]:
    """The page as a person uses it."""
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("#runs tbody tr[data-id]")
    yield "first table in the browser", f"{time.perf_counter() - began:.2f} s"
    page.wait_for_timeout(1500)
    yield "long tasks until then", tasks(page)
    for column in ("name", "best", "differs"):
        times = [page.evaluate(ACT, ["click", f"th[data-sort={column}] button", ""]) for _ in range(3)]
        yield f"sort by {column}", f"{statistics.median(times):.0f} ms"
    times = [page.evaluate(ACT, ["type", "#search", text]) for text in ("f", "fe", "fed", "feda", "fedad", "fedada")]
    yield "a keystroke in the filter", f"{statistics.median(times):.0f} ms, at most {max(times):.0f}"
    page.evaluate(ACT, ["type", "#search", ""])
    yield "long tasks of sorting and filtering", tasks(page)
    frames = page.evaluate(SCROLL, 100)
    late = sum(t > 34 for t in frames)
    yield (
        "100 frames of scrolling",
        f"median {statistics.median(frames):.0f} ms, {late} above 34 ms, most {max(frames):.0f}",
    )
    yield "long tasks of scrolling", tasks(page)
    yield "memory of the page (JavaScript)", f"{heap(page):.0f} MB"
    began = time.perf_counter()
    page.evaluate("location.hash = '#/run?id=long%2Flong-0000'")
    page.wait_for_selector("#curves polyline", state="attached")
    yield "a run of 5,000 rounds is shown", f"{time.perf_counter() - began:.2f} s"
    times = [page.evaluate(ACT, ["type", "#smooth", value]) for value in ("0.5", "0.9", "0.97")]
    yield "its smoothing changes", f"{statistics.median(times):.0f} ms"
    began = time.perf_counter()
    ids = "&".join(f"id=long%2Flong-000{i}" for i in range(3))
    page.evaluate(f"location.hash = '#/compare?{ids}'")
    page.wait_for_selector("#compared polyline", state="attached")
    yield "three of them are compared", f"{time.perf_counter() - began:.2f} s"
    times = [page.evaluate(ACT, ["type", "#smooth", value]) for value in ("0.5", "0.9", "0.97")]
    yield "smoothing of the comparison", f"{statistics.median(times):.0f} ms"
    yield "long tasks of the curves", tasks(page)


def tasks(page: Page) -> str:
    """How many long tasks there were since the last question, and the longest."""
    found = page.evaluate("window.long.splice(0)")
    return f"{len(found)}, the longest {max(found):.0f} ms" if found else "none"


def heap(page: Page) -> float:
    """Megabytes of JavaScript objects after a collection."""
    session = page.context.new_cdp_session(page)
    session.send("HeapProfiler.collectGarbage")
    return float(session.send("Runtime.getHeapUsage")["usedSize"]) / 2**20


def resident(pid: int) -> float:
    """Megabytes of memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def rest(pid: int, seconds: float = 5.0) -> float:
    """The share of a core a process takes while nothing happens."""

    def spent() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = spent()
    time.sleep(seconds)
    return (spent() - before) / seconds


if __name__ == "__main__":
    main()
