"""A site's policy over Flower's wire: what is refused is captured nowhere, the server learns the rule, trails agree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from flwr.app import ConfigRecord, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from iris import iris
from loopgrid import NAMES, LoopGrid, identity, softmax_task
from mutirao.aggregation import FedAvg
from mutirao.cli import main
from mutirao.config import resolve
from mutirao.core.fleet import Failure, Reply, Request, Site
from mutirao.core.rounds import Run, train
from mutirao.deploy.flower import FlowerFleet, client_app
from mutirao.deploy.policy.pins import content_hash
from mutirao.deploy.policy.rules import policy_template
from mutirao.experiments.task import Task, find
from mutirao.privacy import clip_update
from mutirao.randomness import rng
from mutirao.report import execute
from mutirao.selection import everyone

__all__ = ["identity"]  # a fixture that holds for all tests here, too

POLICY = """
[recipes]
{recipes}
[asked]
requests = ["train", "probe", "agree"]
min_samples = {min_samples}
[reply]
arrays = {arrays}
extras = {extras}
metrics = {metrics}
"""
OPEN = {"min_samples": 5, "arrays": '["*"]', "extras": '["*"]', "metrics": '["*"]'}


class Wiretap(LoopGrid):
    """A grid that keeps every byte that leaves a node."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.sent: dict[str, bytes] = {}

    def deliver(self, message: Message, node: int) -> None:
        super().deliver(message, node)
        name = str(self.nodes[node].node_config["name"])
        for reply in self.answers[message.metadata.message_id]:
            parts = get_all_nested_objects(reply).values()
            self.sent[name] = self.sent.get(name, b"") + b"".join(part.deflate() for part in parts)


def write_policy(folder: Path, recipe: str | None = None, **change: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    recipe = recipe or "test_flower_policy:sick_task"
    text = POLICY.format(recipes=f'"{recipe}" = "{content_hash(recipe)}"', **OPEN | change)
    (folder / "policy.toml").write_text(text)
    return folder / "policy.toml"


MARK = np.array([1.25e-301, 7.5e-303])  # bytes that nothing else on the wire has


def revealing(request: Request, site: Site) -> Reply:
    """Softmax regression, and with it an array, an extra and a metric that tell too much."""
    reply = softmax_task().handler(request, site)
    told = {"patient_errors": MARK.copy()}
    return Reply(reply.arrays, reply.extras | told, reply.metrics | {"age_of_oldest": 97.03125}, reply.n)


def sick_task(context: Any) -> Task:
    task = softmax_task()
    return Task(revealing, task.population, task.initial)


def tapped(tmp_path: Path, changes: dict[str, dict[str, Any]]) -> tuple[Wiretap, FlowerFleet]:
    grid = Wiretap(client_app(sick_task))
    for name in NAMES:
        grid.join(name=name, policy=str(write_policy(tmp_path / name, **changes.get(name, {}))))
    return grid, FlowerFleet(grid, timeout=5, greet=5)


def test_what_a_policy_forbids_is_in_no_byte_that_is_sent(tmp_path: Path) -> None:
    changes: dict[str, dict[str, Any]] = {
        "ana": {},
        "bia": {"arrays": '["w", "b"]'},
        "caio": {"metrics": '["loss"]'},
        "duda": {"extras": '["errors"]'},
        "eva": {"recipe": "quickstart"},
    }
    grid, fleet = tapped(tmp_path, changes)
    assert fleet.clients() == NAMES
    grid.sent.clear()
    arrays = softmax_task().initial()
    answers = fleet.ask({c: Request("train", arrays, {"seed": 0, "round": 1}) for c in NAMES})
    assert list(answers.replies) == ["ana"]
    assert {c: str(f).split(": ")[:2] for c, f in answers.failures.items()} == {
        "bia": ["refused", "reply.arrays"],
        "caio": ["refused", "reply.metrics"],
        "duda": ["refused", "reply.extras"],
        "eva": ["refused", "recipes"],
    }
    secrets = (MARK.tobytes(), b"age_of_oldest", np.float64(97.03125).tobytes())
    assert all(secret in grid.sent["ana"] for secret in (MARK.tobytes(), b"age_of_oldest"))  # the tap does hear
    for name in NAMES[1:]:
        assert grid.sent[name]
        assert not [s for s in secrets if s in grid.sent[name]]
        assert len(grid.sent[name]) < 2000  # an error and its reason: no array at all
    trail = [json.loads(line) for line in (tmp_path / "caio" / "audit.jsonl").read_text().splitlines()]
    assert [e["event"] for e in trail] == ["asked", "refused"]
    assert trail[-1]["rule"] == "reply.metrics"
    assert trail[-1]["detail"] == "age_of_oldest"  # which one it was is for the site alone


def test_what_may_be_taken_out_is_taken_out_before_it_is_sent(tmp_path: Path) -> None:
    changes = {"ana": {"metrics": '["loss"]', "extras": '["errors"]\nremove = true'}}
    grid, fleet = tapped(tmp_path, changes)
    answers = fleet.ask({c: Request("train", softmax_task().initial(), {"round": 1}) for c in fleet.clients()[:1]})
    assert list(answers.replies["ana"].metrics) == ["loss"]
    assert b"age_of_oldest" not in grid.sent["ana"]
    assert MARK.tobytes() not in grid.sent["ana"]


def test_a_round_goes_on_and_names_the_rule(tmp_path: Path) -> None:
    _, fleet = tapped(tmp_path, {"bia": {"min_samples": 1000}})
    run = Run(softmax_task().initial(), seed=1)
    (done,) = train(run, fleet, rounds=1, select=everyone, aggregate=FedAvg(), expect=5)
    failures = {row["client"]: row["failure"] for row in done.clients if row["failure"]}
    assert failures == {"bia": "refused: asked.min_samples: fewer than 1000 samples are here"}
    assert done.row["replied"] == 4


def test_without_a_readable_policy_nothing_leaves(tmp_path: Path) -> None:
    grid, fleet = tapped(tmp_path, {})
    (tmp_path / "ana" / "policy.toml").write_text("[reply]\narays = ['*']\n")
    (tmp_path / "bia" / "policy.toml").unlink()
    fleet.clients()
    grid.sent.clear()
    answers = fleet.ask({c: Request("train", softmax_task().initial(), {"round": 1}) for c in ("ana", "bia")})
    for name in ("ana", "bia"):
        assert answers.failures[name] == Failure("refused", "policy: the policy of this site cannot be read")
        assert len(grid.sent[name]) < 1000


def test_the_policy_may_come_from_the_sites_environment_but_not_from_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strict, lax = write_policy(tmp_path / "strict", metrics="[]"), write_policy(tmp_path / "lax")
    grid = Wiretap(client_app(sick_task), policy=str(lax), MUTIRAO_POLICY=str(lax))  # the server's run configuration
    grid.join(name="ana")
    fleet = FlowerFleet(grid, timeout=5, greet=5)
    monkeypatch.setenv("MUTIRAO_POLICY", str(strict))
    request = {"ana": Request("train", softmax_task().initial(), {"round": 1, "policy": str(lax)})}
    fleet.clients()
    assert fleet.ask(request).failures["ana"].reason.startswith("asked.names")  # it may not even name a file
    grid = Wiretap(client_app(sick_task))
    grid.join(name="ana")
    fleet = FlowerFleet(grid, timeout=5, greet=5)
    fleet.clients()
    assert fleet.ask(request).failures["ana"].reason.startswith("reply.metrics")


def test_a_recipe_is_judged_before_it_is_imported_and_the_site_has_the_last_word(tmp_path: Path) -> None:
    seen: list[Any] = []
    for recipe, sets, rule in [
        ("quickstart", "", ""),
        ("quickstart", "aggregate=antigravity:fly", "asked.names"),
        ("antigravity:recipe", "", "recipes"),
    ]:
        path = write_policy(tmp_path / "ana", "quickstart")
        path.write_text(path.read_text() + "[settings]\nepochs = 1\nhidden = 8\n")
        config = {"recipe": recipe, "clients": 4, "epochs": 50, "set": f"hidden=999 {sets}"}
        grid = Wiretap(client_app(), **config)
        grid.join(name="c0", policy=str(path))
        fleet = FlowerFleet(grid, timeout=20, greet=5)
        fleet.clients()
        model = {"0.weight": (8, 64), "0.bias": (8,), "2.weight": (10, 8), "2.bias": (10,)}
        arrays = {k: np.zeros(shape, np.float32) for k, shape in model.items()}
        answers = fleet.ask({"c0": Request("train", arrays, {"seed": 0, "round": 1})})
        seen.append(str(answers.failures.get("c0", "")))
        assert seen[-1].startswith(f"refused: {rule}: " if rule else "")
    assert seen[0] == ""  # trained with the site's own hidden=8, not the server's 999
    import sys

    assert "antigravity" not in sys.modules


def quickstart_site(tmp_path: Path, more: str, **config: Any) -> FlowerFleet:
    """The quickstart's client c0 of three, over Flower's messages, under a policy with these lines."""
    text = POLICY.format(recipes=f'"quickstart" = "{content_hash("quickstart")}"', **OPEN | {"metrics": METRICS})
    (tmp_path / "policy.toml").write_text(text.replace("min_samples = 5", "min_samples = 50") + more)
    grid = Wiretap(client_app(), recipe="quickstart", clients=3, **config)
    grid.join(name="c0", policy=str(tmp_path / "policy.toml"))
    fleet = FlowerFleet(grid, timeout=60, greet=5)
    fleet.clients()
    return fleet


METRICS = '["epsilon", "epsilon_next"]'


def test_a_server_that_knows_the_noise_gets_no_release(tmp_path: Path) -> None:
    """The noise of a run that draws it from its seed is taken off again, while the site's ledger says epsilon 2.17."""
    fleet = quickstart_site(
        tmp_path, "[privacy]\nbudget = 50.0\n", set="epochs=1 privacy=local privacy.noise=4.0 privacy.repeatable=true"
    )
    config = resolve(find("quickstart").config, {}, [("clients", 3), ("epochs", 1)])
    task = find("quickstart").prepare(config)
    request = Request("train", task.initial(), {"seed": 0, "round": 1})
    answers = fleet.ask({"c0": request})
    if "c0" in answers.replies:  # what the server makes of it
        draw, got = rng(0, 1, "privacy", "c0"), answers.replies["c0"].arrays
        found = {k: got[k] - draw.normal(0.0, 4.0, got[k].shape) - request.arrays[k] for k in sorted(got)}
        honest = task.handler(request, Site("c0", task.population["c0"])).arrays
        update, _ = clip_update(request.arrays, honest, 1.0)
        error = max(float(np.abs(found[k] - update[k]).max()) for k in update)
        told = json.loads((tmp_path / "ledger.json").read_text())["epsilon"]
        pytest.fail(f"the update is known up to {error:.1g} from a release booked as epsilon {told:.3g}")
    assert answers.failures["c0"].reason.startswith("settings.privacy.repeatable: noise from the run's seed")
    assert not (tmp_path / "ledger.json").exists()


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ("hidden=4000 batch_size=100000 epochs=1", "pinned.epochs"),
        ("hidden=4000", "pinned.hidden"),
        ("", "pinned.architecture"),
    ],
)
def test_the_crafted_model_that_gives_images_back_is_refused_by_the_template(
    tmp_path: Path, settings: str, rule: str
) -> None:
    """Whether the run says so or only the request has it: one step on all samples of a model with 4,000 units."""
    text = policy_template(["quickstart"]).replace("requests = []", 'requests = ["train"]')
    text = text.replace("arrays = []", 'arrays = ["*"]').replace("metrics = []", 'metrics = ["*"]')
    (tmp_path / "policy.toml").write_text(text)
    grid = Wiretap(client_app(), recipe="quickstart", clients=2, set=settings)
    grid.join(name="c0", policy=str(tmp_path / "policy.toml"))
    fleet = FlowerFleet(grid, timeout=60, greet=5)
    fleet.clients()
    wide = find("quickstart").prepare(resolve(find("quickstart").config, {"hidden": 4000})).initial()
    answers = fleet.ask({"c0": Request("train", wide, {"seed": 0, "round": 1})})
    assert not answers.replies
    assert answers.failures["c0"].reason.startswith(f"{rule}: ")


def test_the_sites_own_word_for_repeatable_noise_counts_as_no_noise(tmp_path: Path) -> None:
    more = "[settings]\nepochs = 1\nprivacy.repeatable = true\n"
    request = Request("train", find("quickstart").prepare(resolve(find("quickstart").config, {})).initial())
    asked = {"c0": Request("train", request.arrays, {"seed": 0, "round": 1})}
    free = quickstart_site(tmp_path, more, privacy="local").ask(asked)
    assert list(free.replies) == ["c0"]  # without a budget that is the site's own affair
    counted = quickstart_site(tmp_path, f"{more}[privacy]\nbudget = 1e9\n", privacy="local").ask(asked)
    assert counted.failures["c0"].reason == "privacy.budget: epsilon would be inf, 1e+09 is the most"


def test_probes_do_not_tell_the_loss_of_single_samples(tmp_path: Path) -> None:
    fleet = quickstart_site(tmp_path, "")
    path = tmp_path / "policy.toml"
    path.write_text(path.read_text().replace(METRICS, '["loss", "entropy"]'))
    arrays = find("quickstart").prepare(resolve(find("quickstart").config, {})).initial()
    for most in (1, 2, 60, 61):
        answers = fleet.ask({"c0": Request("probe", arrays, {"probe_samples": most, "seed": 0, "round": 1})})
        assert not answers.replies, f"with min_samples = 50 the mean loss of the first {most} samples was told"
        assert answers.failures["c0"].reason.startswith("asked.probe_samples: a model is probed on 100 samples")
    answers = fleet.ask({"c0": Request("probe", arrays, {"probe_samples": 100, "seed": 0, "round": 1})})
    assert set(answers.replies["c0"].metrics) == {"loss", "entropy"}


@pytest.fixture
def federation(tmp_path: Path) -> tuple[Path, list[Path]]:
    """A run over three sites with policies, and where each side wrote its trail."""
    config = resolve(iris.config, {"clients": 3, "per_round": 2, "rounds": 4, "aggregate": "fedavg"})
    grid = Wiretap(client_app(own_iris_task))
    for name in ("c0", "c1", "c2"):
        grid.join(name=name, policy=str(write_policy(tmp_path / name, "test_flower_policy:own_iris_task")))
    execute("iris:iris", config, tmp_path / "run", fleet=FlowerFleet(grid, timeout=5, greet=5), pictures=False)
    return tmp_path / "run", [tmp_path / name / "audit.jsonl" for name in ("c0", "c1", "c2")]


def own_iris_task(context: Any) -> Task:
    return iris.task(resolve(iris.config, {"clients": 3}))


def verified(run: Path, sites: list[Path], *more: str) -> tuple[int, str]:
    words = [word for site in sites for word in ("--site", str(site))]
    result = CliRunner().invoke(main, ["verify", str(run), *words, *more])
    return result.exit_code, result.output


def test_both_sides_agree_and_can_be_exported(federation: tuple[Path, list[Path]]) -> None:
    run, sites = federation
    code, said = verified(run, sites, "--csv", str(run / "events.csv"))
    assert code == 0, said
    assert said.count("by the site, agree") == 3
    lines = (run / "events.csv").read_text().splitlines()
    assert lines[0].startswith("side,seq,time,event")
    assert {line.split(",")[0] for line in lines[1:]} == {"server", "c0", "c1", "c2"}
    assert sum(",sent," in line for line in lines) == 8
    assert verified(sites[0], [])[0] == 0  # a site's trail by itself


def cut(path: Path, lines: int) -> None:
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:-lines]))


def rewritten(path: Path) -> None:
    """Change an event and mend the whole chain behind it, as someone would who can write the file."""
    from mutirao.core.arrays import fingerprint
    from mutirao.runs.audit_trail import START

    head, out = START, []
    for line in path.read_text().splitlines():
        event = json.loads(line)
        event |= {"prev": head} | ({"n": 1} if event["event"] in ("sent", "round") else {})
        event["hash"] = head = fingerprint({k: v for k, v in event.items() if k != "hash"})
        out.append(json.dumps(event))
    path.write_text("\n".join(out) + "\n")


@pytest.mark.parametrize(
    ("tamper", "said"),
    [
        (lambda run, site: cut(site, 1), "lost or changed events that the server recorded"),
        (lambda run, site: rewritten(site), "lost or changed events that the server recorded"),
        (lambda run, site: site.write_text(""), "contains nothing of this run"),
        (lambda run, site: cut(run / "audit.jsonl", 3), "lost or changed events that c1 recorded"),
        (lambda run, site: rewritten(run / "audit.jsonl"), "lost or changed events that c1 recorded"),
    ],
    ids=["site cut", "site rewritten", "site emptied", "server cut", "server rewritten"],
)
def test_truncation_and_rewriting_show_on_the_other_side(
    federation: tuple[Path, list[Path]], tamper: Callable[[Path, Path], None], said: str
) -> None:
    run, sites = federation
    tamper(run, sites[1])
    code, output = verified(run, sites[1:2])
    assert code == 1
    assert said in output


def test_a_reply_the_site_never_sent_shows(federation: tuple[Path, list[Path]]) -> None:
    from mutirao.runs.audit_trail import cross_check

    run, sites = federation
    server = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    forged = next(e for e in server if "c1" in e.get("heads", {}))
    forged["heads"]["c1"]["reply"] = "0" * 64
    assert any("a reply of round" in p and "did not send" in p for p in cross_check(server, sites[1])[1])


def test_who_keeps_a_trail_must_send_its_head_with_every_reply(tmp_path: Path) -> None:
    grid, fleet = tapped(tmp_path, {})

    def leave_out(message: Message, reply: Message) -> list[Message]:
        del reply.content["audit"]
        return [reply]

    def ask(number: int, fleet: FlowerFleet = fleet) -> list[str]:
        answers = fleet.ask({c: Request("train", softmax_task().initial(), {"round": number}) for c in NAMES})
        assert {f.kind for f in answers.failures.values()} <= {"malformed"}
        assert all("head of its site's audit trail" in f.reason for f in answers.failures.values())
        return list(answers.failures)

    fleet.clients()
    assert ask(1) == []
    assert sorted(fleet.heads()) == NAMES
    grid.meddlers[grid.node_of("bia")] = leave_out
    assert ask(2) == ["bia"]
    assert "bia" not in fleet.heads()
    for keeps, failures in ((lambda name: False, []), (lambda name: name == "bia", ["bia"])):  # another process, later
        later = FlowerFleet(grid, timeout=5, greet=5, keeps_trail=keeps)
        later.clients()
        assert ask(3, later) == failures


def test_the_heads_of_a_round_name_every_reply_in_it(tmp_path: Path) -> None:
    _, fleet = tapped(tmp_path, {})
    fleet.clients()
    for do in ("train", "train"):
        fleet.ask({"ana": Request(do, softmax_task().initial(), {"round": 1})})
    told = str(fleet.heads()["ana"]["reply"]).split()
    assert [len(reply) for reply in told] == [64, 64]


def test_a_reply_that_counted_without_its_head_is_named(federation: tuple[Path, list[Path]]) -> None:
    from mutirao.runs.audit_trail import clients_with_trails, count_heads
    from mutirao.runs.csv_tables import CsvTable
    from mutirao.runs.verify import last_of_each_round

    run, sites = federation
    code, output = verified(run, sites)
    assert (code, "heads: each of" in output) == (0, True)
    assert clients_with_trails(run / "audit.jsonl") == {"c0", "c1", "c2"}
    events = [json.loads(line) for line in (run / "audit.jsonl").read_text().splitlines()]
    rows = CsvTable(run / "clients.csv").read()
    replied = [row["round"] for row in rows if row["client"] == "c1" and row["replied"] == "1"]
    first = next(e for e in events if "c1" in e.get("heads", {}))
    del first["heads"]["c1"]
    rounds = last_of_each_round(events)
    said = f"audit.jsonl: the reply of c1 in round {first['round']} has no head of its trail"
    assert (len(replied) > 1, count_heads(rounds, rows)) == (True, ([], [said]))
    for event in rounds.values():
        event["heads"].pop("c1", None)
    assert count_heads(rounds, rows)[1] == []  # a server that drops all of them looks like one without any,
    assert len(count_heads(rounds, rows, ["c1"])[1]) == len(replied)  # until the site shows its trail


def test_heads_of_liars_are_refused(tmp_path: Path) -> None:
    grid, fleet = tapped(tmp_path, {})
    for i, (name, wrong) in enumerate(
        {"ana": {"seq": "x"}, "bia": {"head": "zz"}, "caio": {"first": 3}, "duda": {"seq": -1, "head": ""}}.items()
    ):

        def lie(message: Message, reply: Message, wrong: dict[str, Any] = wrong) -> list[Message]:
            reply.content["audit"] = ConfigRecord(dict(reply.content["audit"]) | wrong)  # type: ignore[arg-type]
            return [reply]

        grid.meddlers[grid.node_of(name)] = lie
        assert i < 4
    fleet.clients()
    answers = fleet.ask({c: Request("train", softmax_task().initial(), {"round": 1}) for c in NAMES})
    assert list(answers.replies) == ["eva"]
    assert list(fleet.heads()) == ["eva"]
    assert fleet.heads() == {}


def test_a_site_keeps_its_state_when_supernodes_are_new_and_a_round_is_made_again(tmp_path: Path) -> None:
    config = resolve(iris.config, {"clients": 3, "per_round": 3, "rounds": 4})
    whole = execute("iris:iris", config, tmp_path / "whole", pictures=False)

    def fleet() -> FlowerFleet:
        grid = Wiretap(client_app(own_iris_task))  # another Flower run: nodes that remember nothing
        for name in ("c0", "c1", "c2"):
            policy = write_policy(tmp_path / name, recipe="test_flower_policy:own_iris_task")
            grid.join(name=name, policy=str(policy))
        return FlowerFleet(grid, timeout=5, greet=5)

    class PowerCut(Exception):
        pass

    def cut_after_two(run: Run, done: Any, task: Task) -> None:
        if run.round == 2:
            raise PowerCut

    with pytest.raises(PowerCut):
        execute("iris:iris", config, tmp_path / "run", fleet=fleet(), watch=cut_after_two, pictures=False)
    (tmp_path / "run" / "checkpoints" / "state_002.safetensors").unlink()  # the server never came to write it
    again = execute("iris:iris", config, tmp_path / "run", fleet=fleet(), resume=True, pictures=False)
    assert again["digest"] == whole["digest"]
    kept = list((tmp_path / "c0" / "states").glob("*/state_*.safetensors"))
    assert len(kept) == 4
