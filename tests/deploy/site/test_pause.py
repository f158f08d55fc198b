"""The pause switch: from the next request on nothing is answered, by name, and both turns are written down."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from loopgrid import LoopGrid, identity, softmax_task
from mutirao.cli import main
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.deploy.doctor import examine
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.layout import Node
from mutirao.deploy.policy.enforcement import PolicyHandler, Requester
from mutirao.deploy.policy.pins import content_hash
from mutirao.deploy.policy.privacy_ledger import Ledger
from mutirao.deploy.policy.rules import Policy, PrivacyRules, ReplyRules, RequestRules, load_policy
from mutirao.deploy.provisioning import create_site
from mutirao.deploy.site.pause import is_paused, set_pause
from mutirao.errors import Refused
from mutirao.experiments.task import Task
from mutirao.runs.audit_trail import check_chain

__all__ = ["identity"]  # a fixture that holds for all tests here, too

POLICY = f"""
[recipes]
"test_pause:own_task" = "{content_hash("test_pause:own_task")}"
[asked]
requests = ["train"]
[reply]
arrays = ["*"]
metrics = ["*"]
extras = ["*"]
"""


def own_task(context: object) -> Task:
    return softmax_task()


@pytest.fixture
def node(tmp_path: Path) -> Node:
    made = create_site(tmp_path / "ana", "ana", "localhost:9092")
    made.policy_file.write_text(POLICY)
    return made


def turn(node: Node, *words: str) -> str:
    return CliRunner().invoke(main, ["site", "pause", str(node.folder), *words]).output


def test_a_running_site_refuses_from_the_next_request_on_and_answers_again_without_a_restart(node: Node) -> None:
    grid = LoopGrid(client_app(own_task))
    grid.join(name="ana", policy=str(node.policy_file))
    fleet, request = FlowerFleet(grid, timeout=5, greet=5), Request("train", softmax_task().initial(), {"seed": 0})
    assert fleet.clients() == ["ana"]
    assert list(fleet.ask({"ana": request}).replies) == ["ana"]
    assert turn(node) == f"{node.folder} is paused: nothing is answered\n"
    assert "already" in turn(node)
    paused = fleet.ask({"ana": request})
    assert paused.failures == {"ana": Failure("refused", "paused: this site is paused by those who run it")}
    assert turn(node, "--off") == f"{node.folder} answers again\n"
    assert list(fleet.ask({"ana": request}).replies) == ["ana"]
    events, problems = check_chain(node.folder / "audit.jsonl")
    assert problems == []
    what = [e["event"] for e in events]
    assert what == ["asked", "sent", "paused", "refused", "resumed", "asked", "sent"]
    assert events[3]["rule"] == "paused"


def spending(folder: Path) -> Policy:
    cover = PrivacyRules(clip=1.0, noise=2.0, budget=10.0)
    asked, files = RequestRules(requests=("train",)), {"audit": folder / "a.jsonl", "ledger": folder / "l.json"}
    return Policy(asked=asked, reply=ReplyRules(arrays=("*",)), privacy=cover, paused=folder / "paused", **files)


def test_what_is_being_made_when_the_switch_is_turned_does_not_leave_and_costs_nothing(tmp_path: Path) -> None:
    policy = spending(tmp_path)

    def slow(request: Request, site: Site) -> Reply:
        policy.paused.touch()
        return Reply({"w": request.arrays["w"] + 1}, n=50)

    request = Request("train", {"w": np.zeros(3)}, {"round": 1})
    with pytest.raises(Refused, match=r"^paused: "):
        PolicyHandler(slow, policy, Requester("1", "quickstart"))(request, Site("ana", None))
    assert [e["event"] for e in check_chain(policy.audit)[0]] == ["asked", "refused"]
    assert Ledger(policy.ledger).runs == {}


def test_a_handler_is_not_called_while_the_site_is_paused(tmp_path: Path) -> None:
    policy = replace(spending(tmp_path), privacy=PrivacyRules())
    policy.paused.symlink_to(tmp_path / "nowhere")  # whoever put it there meant a pause

    def never(request: Request, site: Site) -> Reply:
        raise AssertionError

    with pytest.raises(Refused, match=r"^paused: "):
        PolicyHandler(never, policy)(Request("train", {"w": np.zeros(3)}, {}), Site("ana", None))


def test_the_doctor_and_the_status_say_that_a_site_is_paused(node: Node) -> None:
    assert not [f for f in examine(node.folder) if f.check == "pause"]
    assert set_pause(node.folder)
    (finding,) = [f for f in examine(node.folder) if f.check == "pause"]
    assert (finding.state, f"mutirao site pause {node.folder} --off" in finding.remedy) == ("warn", True)
    assert "paused since 2" in CliRunner().invoke(main, ["site", "status", str(node.folder)]).output
    assert set_pause(node.folder, on=False)
    assert not set_pause(node.folder, on=False)
    assert not is_paused(load_policy(node.policy_file))


def test_a_server_has_no_pause_switch(tmp_path: Path) -> None:
    from mutirao.deploy.provisioning import create_server

    create_server(tmp_path / "server", ["localhost"])
    done = CliRunner().invoke(main, ["site", "pause", str(tmp_path / "server")])
    assert (done.exit_code, "this needs a site's" in done.output) == (2, True)
