"""Three hospitals with a CSV each, over a SuperLink with TLS that knows their keys; a fourth has other columns."""

import contextlib
import json
import time
from pathlib import Path

import numpy as np
import pytest

from mutirao.config import resolve
from mutirao.core.agreement import AgreementFleet, bytes_to_extra, digest_of
from mutirao.core.fleet import Request
from mutirao.deploy.layout import free_port
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.pins import sources
from mutirao.deploy.policy.rules import Policy, ReplyRules, RequestRules
from mutirao.deploy.processes import start_superlink, start_supernode, stop_all
from mutirao.deploy.provisioning import create_server, create_site, store_key
from mutirao.deploy.rehearsal import permit_training
from mutirao.deploy.server.control_calls import admit
from mutirao.deploy.server.submission import follow, submit
from mutirao.experiments.task import find
from mutirao.report import execute
from mutirao.simulation.local_fleet import LocalFleet
from mutirao.systems.tabular.recipe import Config, recipe
from mutirao.systems.tabular.schema import SCHEMA

SETTINGS = {"rounds": 2, "target": "outcome", "task": "classification"}
NAMES = ("north", "south", "west")


def write_site(path: Path, seed: int, dose: str = "dose") -> Path:
    draw = np.random.default_rng(seed)
    lines = [f"age;{dose};ward;outcome"]
    for _ in range(60):
        age, ward = draw.normal(50 + 5 * seed, 15), draw.choice(["A", "B"])
        sick = "yes" if age + draw.normal(0, 5) + 10 * (ward == "A") > 60 else "no"
        lines.append(f"{age:.2f};{draw.gamma(2.0):.3f};{ward};{sick}".replace(".", ","))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.mark.slow
def test_three_files_make_the_model_of_the_local_run_and_a_fourth_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUTIRAO_CACHE", str(tmp_path / "cache"))
    sources.cache_clear()  # the nodes hash what is installed now
    link = create_server(tmp_path / "superlink", ["localhost"], free_port(), host="127.0.0.1")
    started = [start_superlink(link.folder)]
    agreed = {**SETTINGS, "sites": True, "clients": 4}
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: stop_all(reversed(started)))
        for k, name in enumerate((*NAMES, "odd")):
            file = write_site(tmp_path / name / "patients.csv", k, "height" if name == "odd" else "dose")
            node = create_site(
                tmp_path / f"node_{name}",
                *(name, f"localhost:{link.port}", link.ca, str(file), ["tabular"]),
                sets=list(agreed.items()),
            )
            node.policy_file.write_text(permit_training(node.policy_file.read_text()))
            admit(link.folder, store_key(link.folder, node.public_key))
            started.append(start_supernode(node.folder))
        out, since = tmp_path / "run", time.time()
        number = submit(link.folder, "tabular", list(agreed.items()), out, timeout=120)
        (tmp_path / "whole").mkdir()
        for name in NAMES:
            (tmp_path / "whole" / f"{name}.csv").symlink_to(tmp_path / name / "patients.csv")
        config = resolve(find("tabular").config, {**SETTINGS, "data": str(tmp_path / "whole")})
        local = execute("tabular", config, tmp_path / "local")
        follow(link.folder, number, out, since, 240, print)
    there = json.loads((out / "summary.json").read_text())
    assert there["digest"] == local["digest"]
    assert there["final"]["accuracy"] == pytest.approx(local["final"]["accuracy"])  # the sites' own, joined
    assert (out / "schema.json").read_bytes() == (tmp_path / "local" / "schema.json").read_bytes()
    for said in ((out / "run.log").read_text(), (tmp_path / "node_odd" / "audit.jsonl").read_text()):
        assert "missing: 'dose'; too many: 'height'" in said  # the server knows, and so does the site


def test_a_policy_lets_the_profile_leave_only_if_it_says_so(tmp_path: Path) -> None:
    file = write_site(tmp_path / "patients.csv", 0)
    task = recipe.prepare(resolve(Config, {**SETTINGS, "sites": True, "data": str(file)}))
    about = {"seed": 0, "round": 0}

    def ask(policy: Policy, do: str) -> str:
        handler = PolicyHandler(task.handler, policy, Requester())
        fleet = LocalFleet(lambda request, site: handler(request, site), {"north": task.population["north"]})
        agreement = AgreementFleet(fleet, {SCHEMA: digest_of(b"{}")}, bytes_to_extra(SCHEMA, b"{}"), ask_clients=False)
        answers = (agreement if do == "agree" else fleet).ask({"north": Request(do, {}, about)})
        return str(answers.failures.get("north", "")) or ",".join(answers.replies["north"].extras)

    def rules(requests: tuple[str, ...], comes: tuple[str, ...], leaves: tuple[str, ...], least: int = 1) -> Policy:
        asked = RequestRules(requests, min_samples=least, extras=comes)
        return Policy(asked=asked, reply=ReplyRules(extras=leaves), audit=tmp_path / "a", ledger=tmp_path / "l")

    both = ("profile", "agree")
    assert ask(rules((), (), ()), "profile") == "refused: asked.requests: 'profile' may not be asked here"
    assert "reply.extras" in ask(rules(both, (), ()), "profile")
    assert ask(rules(both, (), ("profile",)), "profile") == "profile"
    assert "fewer than 50 samples" in ask(rules(both, (), ("profile",), least=50), "profile")
    assert "asked.extras" in ask(rules(both, (), ()), "agree")
    assert "it is no schema of a table" in ask(rules(both, ("schema",), ()), "agree")
