"""Search sites with a file each: simulated in folders, behind a policy, and over a SuperLink with TLS."""

import contextlib
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.agreement import PROFILE, AgreementFleet, bytes_to_extra, digest_of
from mutirao.core.fleet import Reply, Request
from mutirao.deploy.layout import free_port
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.pins import sources
from mutirao.deploy.policy.rules import Policy, ReplyRules, RequestRules
from mutirao.deploy.processes import start_superlink, start_supernode, stop_all
from mutirao.deploy.provisioning import create_server, create_site, store_key
from mutirao.deploy.rehearsal import permit_training
from mutirao.deploy.server.control_calls import admit
from mutirao.deploy.server.submission import follow, submit
from mutirao.errors import ConfigError
from mutirao.report import execute
from mutirao.runs.csv_tables import CsvTable
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.ranking.feature_scale import (
    SCALE,
    parse_document_profile,
    parse_scale,
    profile_documents,
    scale_from_profiles,
)
from mutirao.systems.ranking.recipe import Config, recipe

SETTINGS: dict[str, Any] = {"rounds": 2, "hidden": 4, "lr": 0.05, "aggregate": "fedavg", "test": 0.25}
NAMES = ("client_north", "client_south", "client_west")


def lines_of(seed: int, queries: int = 12, features: int = 5, top: int = 3, first: int = 0) -> list[str]:
    draw, out = np.random.default_rng(seed), []
    for q in range(first, first + queries):
        for _ in range(6):
            x = draw.gamma(2.0, 1 + seed, features)
            grade = min(top, int(x[0] + draw.normal(0, 0.5) > 2) + int(x[1] > 3))
            out.append(f"{grade} qid:{q} " + " ".join(f"{i}:{v:.4f}" for i, v in enumerate(x, 1)))
    return out


def write(path: Path, lines: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def three_sites(folder: Path) -> Path:
    for k, name in enumerate(NAMES):
        write(folder / name / "train.txt", lines_of(k))
    return folder


def test_a_folder_is_a_client_and_its_moments_are_counted(tmp_path: Path) -> None:
    data = three_sites(tmp_path / "data")
    write(data / NAMES[0] / "test.txt", lines_of(9, 4, first=100))
    summary = execute("ranking", resolve(Config, SETTINGS | {"data": str(data)}), tmp_path / "run", pictures=False)
    rows = CsvTable(tmp_path / "run" / "history.csv").read()
    sent = 3 * 8 * (1 + 2 + 2 * 5)  # of three clients: how many samples, two numbers, and two of each feature
    assert int(rows[0]["bytes_up"]) == int(rows[1]["bytes_up"]) + sent
    scale = parse_scale((tmp_path / "run" / "scale.json").read_bytes())
    queries = [row["query"] for row in CsvTable(tmp_path / "run" / "queries.csv").read()]
    assert sum(q.startswith("client_north/") for q in queries) == 4
    assert len(queries) == 4 + 2 * 3  # a quarter of twelve, where there is no file for it
    x = np.array([[float(w.split(":")[1]) for w in line.split()[2:]] for line in lines_of(0)])
    assert min(x.mean(0)) < max(scale.mean)  # of all three, not of the first alone
    again = execute(
        "ranking",
        resolve(Config, SETTINGS | {"data": str(data), "scale": str(tmp_path / "run" / "scale.json")}),
        *(tmp_path / "given",),
        pictures=False,
    )
    assert again["digest"] == summary["digest"]
    given = CsvTable(tmp_path / "given" / "history.csv").read()
    assert given[0]["bytes_up"] == given[1]["bytes_up"]  # no client was asked


def test_the_scale_is_that_of_all_documents_in_whatever_order_sites_answer() -> None:
    draw = np.random.default_rng(1)
    parts = [draw.normal(3, 2, (n, 4)).astype(np.float32) for n in (7, 20, 50)]
    replies = {f"s{k}": Reply({}, profile_documents(x, k, "log", 5)) for k, x in enumerate(parts)}
    scale = scale_from_profiles(replies, "log")
    assert scale == scale_from_profiles(dict(reversed(replies.items())), "log")
    whole = np.concatenate(parts).astype(np.float64)
    whole = np.sign(whole) * np.log1p(np.abs(whole))
    np.testing.assert_allclose(scale.mean, whole.mean(0), rtol=1e-12)
    np.testing.assert_allclose(scale.std, whole.std(0), rtol=1e-12)
    assert scale.highest == 2
    assert (
        parse_document_profile(Reply({}, profile_documents(parts[0][:4], 1, "log", 5)))[1]["sum"].tolist() == [0.0] * 4
    )  # too few


@pytest.mark.parametrize(
    ("sent", "why"),
    [
        (np.zeros(7), "cannot be read"),
        (np.zeros(6, np.float32), "cannot be read"),
        (np.array([3.0, 1, 0, 0, 1, -1]), "squares of feature 2 are negative"),
        (np.array([3.5, 1, 0, 0, 1, 1]), "3.5 documents"),
        (np.array([-1.0, 1, 0, 0, 1, 1]), "-1 documents"),
        (np.array([1e30, 1, 0, 0, 1, 1]), "1e.30 documents"),
        (np.array([3.0, 300, 0, 0, 1, 1]), "highest grade is 300"),
        (np.array([3.0, 1, np.inf, 0, 1, 1]), "numbers that are not finite"),
    ],
)
def test_a_profile_that_cannot_be_is_named_and_has_no_part(sent: Any, why: str, caplog: Any) -> None:
    with pytest.raises(ValueError, match=why):
        parse_document_profile(Reply({}, {PROFILE: sent}))
    honest = {f"s{k}": Reply({}, profile_documents(np.eye(6, 2) + k, 1, "none", 5)) for k in range(3)}
    with caplog.at_level(logging.WARNING):
        found = scale_from_profiles({**honest, "malicious": Reply({}, {PROFILE: sent})}, "none")
    assert found == scale_from_profiles(honest, "none")
    assert "malicious: " in caplog.text


def test_one_malicious_site_does_not_shift_the_scale() -> None:
    honest = {f"s{k}": Reply({}, profile_documents(np.eye(6, 2) + k, 1, "none", 5)) for k in range(4)}
    malicious = Reply({}, {PROFILE: np.array([10.0, 1, 1e200, 6, 1e300, 2])})
    found, right = scale_from_profiles({**honest, "malicious": malicious}, "none"), scale_from_profiles(honest, "none")
    assert found.mean[0] == right.mean[0]


def test_sites_that_cannot_keep_to_the_scale_are_named(tmp_path: Path, caplog: Any) -> None:
    data = three_sites(tmp_path / "data")
    write(data / "client_odd" / "train.txt", lines_of(5, features=7))
    with caplog.at_level(logging.WARNING):
        execute("ranking", resolve(Config, SETTINGS | {"data": str(data)}), tmp_path / "run", pictures=False)
    assert "client_odd has features 1 to 7, but 1 to 5 are agreed on; too many: 6 to 7" in caplog.text
    assert "client_odd takes no part: refused: agreed.scale: documents here have features 1 to 7" in caplog.text
    rows = CsvTable(tmp_path / "run" / "clients.csv").read()
    assert {row["client"] for row in rows if row["replied"] == "1"} == set(NAMES)
    with pytest.raises(ConfigError, match=r"of 4 clients do not agree on scale.*has grade 2, but grades from 0 to 1"):
        execute("ranking", resolve(Config, SETTINGS | {"data": str(data), "grades": 1}), tmp_path / "one")


def test_queries_that_repeat_are_named(tmp_path: Path, caplog: Any) -> None:
    data = three_sites(tmp_path / "data")
    north = lines_of(0)
    write(data / NAMES[0] / "train.txt", [*north[1:], north[0]])
    with caplog.at_level(logging.WARNING):
        recipe.task(resolve(Config, SETTINGS | {"data": str(data)}))
    assert "the documents of query 0 are not contiguous (1 such places)" in caplog.text
    write(data / NAMES[1] / "test.txt", lines_of(3, 2, first=11))
    with pytest.raises(ConfigError, match="client_south: query 11 is in its train and in its test part"):
        recipe.task(resolve(Config, SETTINGS | {"data": str(data)}))


@pytest.mark.parametrize("promise", [{"privacy": "central"}, {"secure": "secagg+"}])
def test_moments_in_the_clear_break_no_promise(promise: dict[str, str], tmp_path: Path) -> None:
    given = SETTINGS | {"data": str(three_sites(tmp_path / "data"))} | promise
    with pytest.raises(ConfigError, match=r"scale=FILE.json .* or set moments=false"):
        recipe.task(resolve(Config, given))
    assert recipe.task(resolve(Config, given | {"moments": False})).handler.own  # type: ignore[attr-defined]


def test_a_policy_lets_moments_leave_only_if_it_says_so(tmp_path: Path) -> None:
    file = write(tmp_path / "own.txt", lines_of(0))
    config = resolve(Config, SETTINGS | {"sites": True, "data": str(file)})
    task = recipe.prepare(config)
    exchange = recipe.disclosure(config, task)
    assert {"profile", "evaluate", "train"} <= set(exchange.requests)
    assert (exchange.extras, exchange.request_extras) == (("profile",), ("scale",))
    about = {"seed": 0, "round": 0}

    def ask(policy: Policy, do: str) -> str:
        handler = PolicyHandler(task.handler, policy, Requester())
        fleet = LocalFleet(lambda request, site: handler(request, site), {"north": task.population["north"]})
        sent = AgreementFleet(fleet, {SCALE: digest_of(b"{}")}, bytes_to_extra(SCALE, b"{}"), ask_clients=False)
        answers = (sent if do == "agree" else fleet).ask({"north": Request(do, {}, about)})
        return str(answers.failures.get("north", "")) or ",".join(answers.replies["north"].extras)

    def rules(requests: tuple[str, ...], comes: tuple[str, ...], leaves: tuple[str, ...]) -> Policy:
        asked = RequestRules(requests, extras=comes)
        return Policy(asked=asked, reply=ReplyRules(extras=leaves), audit=tmp_path / "a", ledger=tmp_path / "l")

    both = ("profile", "agree")
    assert ask(rules((), (), ()), "profile") == "refused: asked.requests: 'profile' may not be asked here"
    assert "reply.extras" in ask(rules(both, (), ()), "profile")
    assert ask(rules(both, (), ("profile",)), "profile") == "profile"
    assert "asked.extras" in ask(rules(both, (), ()), "agree")
    assert "it is no scale of features" in ask(rules(both, ("scale",), ()), "agree")


@pytest.mark.slow
def test_three_files_deployed_make_the_model_of_the_local_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    sources.cache_clear()  # the nodes hash what is installed now
    data = three_sites(tmp_path / "data")
    link = create_server(tmp_path / "superlink", ["localhost"], free_port(), host="127.0.0.1")
    started = [start_superlink(link.folder)]
    agreed = {**SETTINGS, "sites": True, "clients": 3}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: stop_all(reversed(started)))
        for name in NAMES:
            node = create_site(
                tmp_path / f"node_{name}",
                *(name, f"localhost:{link.port}", link.ca, str(data / name), ["ranking"]),
                sets=list(agreed.items()),
            )
            node.policy_file.write_text(permit_training(node.policy_file.read_text()))
            admit(link.folder, store_key(link.folder, node.public_key))
            started.append(start_supernode(node.folder))
        out, since = tmp_path / "run", time.time()
        number = submit(link.folder, "ranking", list(agreed.items()), out, timeout=120)
        local = execute("ranking", resolve(Config, SETTINGS | {"data": str(data)}), tmp_path / "local", pictures=False)
        follow(link.folder, number, out, since, 240, print)
    there = json.loads((out / "summary.json").read_text())
    assert there["digest"] == local["digest"]
    assert there["final"] == pytest.approx(local["final"])  # the sites' own figures, joined
    assert (out / "scale.json").read_bytes() == (tmp_path / "local" / "scale.json").read_bytes()
    assert there["bytes_up"] >= local["bytes_up"] > 0
