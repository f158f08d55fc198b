"""What becomes of a run that was handed over, as its folder and Flower tell; and a SuperNode that waits at the door."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from mutirao.cli import main
from mutirao.core.fleet import Scalar
from mutirao.deploy.layout import Server, free_port
from mutirao.deploy.provisioning import create_server
from mutirao.deploy.server import submission
from mutirao.deploy.server.submission import absolute_paths, follow, run_folder, submit
from mutirao.deploy.site.supernode import retry_on_bad_certificate, retry_until_admitted
from mutirao.errors import MutiraoError


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return create_server(tmp_path / "server", ["localhost"], free_port(), host="127.0.0.1")


def write_event(out: Path, **event: Any) -> None:
    out.mkdir(exist_ok=True)
    with (out / "audit.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")


def test_the_end_of_a_run_is_seen_with_each_of_its_rounds(server: Server, tmp_path: Path) -> None:
    out, said = tmp_path / "run", list[str]()
    since = time.time() - 1
    write_event(out, event="round", round=1)
    (out / "history.csv").write_text("round,seconds,replied,failed,loss,accuracy\n1,2.51234567,3,0,0.25,0.912345\n")
    (out / "summary.json").write_text("{}")
    follow(server.folder, "7", out, since, 5, said.append)
    assert said == ["round=1 seconds=2.512 replied=3 failed=0 loss=0.25 accuracy=0.9123"]


def test_a_run_that_failed_says_why(server: Server, tmp_path: Path) -> None:
    write_event(tmp_path / "run", event="failed", round=2, reason="round 2 failed 3 times")
    with pytest.raises(MutiraoError, match="the run failed: round 2 failed 3 times"):
        follow(server.folder, "7", tmp_path / "run", time.time() - 1, 5, print)


def test_what_an_earlier_run_left_in_the_folder_does_not_count(server: Server, tmp_path: Path) -> None:
    write_event(tmp_path / "run", event="failed", round=2, reason="long ago")
    (tmp_path / "run" / "summary.json").write_text("{}")
    with pytest.raises(MutiraoError, match="did not end within 0 s"):
        follow(server.folder, "7", tmp_path / "run", time.time() + 60, 0, print)


APP_LOG = """\
Traceback (most recent call last):
  File "os.py", line 1, in listdir
FileNotFoundError: [Errno 2] No such file or directory: '/nowhere'

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "server.py", line 40, in main
mutirao.errors.ConfigError: there is no folder /nowhere; right would be a folder
\x1b[91mERROR \x1b[0m:     Exit Code: 201

An unhandled exception occurred in the ServerApp.
"""


@pytest.mark.parametrize(
    ("status", "log", "said"),
    [
        ("finished:completed", "", ""),
        ("finished:failed", "", r"ended as finished:failed; see .*superlink\.log"),
        ("finished:failed", APP_LOG, "^the run failed: there is no folder /nowhere; right would be a folder$"),
        ("finished:failed", APP_LOG.replace("mutirao.errors.Conf", "Value"), "^the run failed: ValueigError: there is"),
    ],
)
def test_a_run_that_never_wrote_a_folder_is_asked_for_at_flower(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, log: str, said: str
) -> None:
    monkeypatch.setattr(submission, "status_of", lambda *_: status)
    monkeypatch.setattr(submission, "run_flwr", lambda *_: subprocess.CompletedProcess([], 0, stdout=log))
    monkeypatch.setattr(submission, "POLL_FLOWER", 0.0)
    if not said:
        follow(server.folder, "7", tmp_path / "run", time.time(), 5, print)
    else:
        with pytest.raises(MutiraoError, match=said):
            follow(server.folder, "7", tmp_path / "run", time.time(), 5, print)


@pytest.mark.parametrize(
    ("recipe", "sets", "said"),
    [
        ("cytology", ["data=/nowhere"], "there is no folder /nowhere"),
        ("tabular", ["data=/nowhere.csv", "target=x"], "/nowhere.csv"),
        ("quickstart", ["aggregate=fedavgg"], "no part is called 'fedavgg'"),
        ("quickstart", ["--out", "{held}"], "already holds a run; add --resume"),
        ("quickstart", ["--out", "{file}/run"], "is no folder that this user may write to"),
    ],
)
def test_what_cannot_run_is_said_before_it_is_submitted(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, sets: list[str], said: str
) -> None:
    monkeypatch.setattr(submission, "submit", lambda *_: pytest.fail("it was submitted"))
    (tmp_path / "held").mkdir()
    (tmp_path / "held" / "config.toml").touch()
    (tmp_path / "file").touch()
    words = [word.format(held=tmp_path / "held", file=tmp_path / "file") for word in sets]
    words = words if words[0] == "--out" else [word for pair in words for word in ("--set", pair)]
    done = CliRunner().invoke(main, ["site", "run", str(server.folder), recipe, *words])
    assert (done.exit_code, said in done.output, "Traceback" in done.output) == (2, True, False), done.output


def test_a_path_is_seen_from_where_the_command_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cells").mkdir()
    (tmp_path / "digits").mkdir()
    monkeypatch.chdir(tmp_path)
    asked: list[tuple[str, Scalar]] = [
        ("data", "cells"),
        ("weights", "cells/none.pt"),
        ("body", "cells"),
        ("rounds", 3),
    ]
    assert absolute_paths(asked) == [("data", str(tmp_path / "cells")), *asked[1:]]
    assert absolute_paths([("data", "digits"), ("data", "./digits")])[0] == ("data", "digits")  # a set by that name
    assert absolute_paths([("weights", "./cells")]) == [("weights", str(tmp_path / "cells"))]


def test_nobody_to_hand_a_run_to(server: Server) -> None:
    with pytest.raises(MutiraoError, match=r"does not answer at 127.*start it with: mutirao site up"):
        submit(server.folder, "quickstart")
    done = CliRunner().invoke(main, ["site", "run", str(server.folder), "quickstart", "--set", "ruonds=3"])
    assert (done.exit_code, "unknown setting 'ruonds'; did you mean 'rounds'" in done.output) == (2, True)


def test_where_a_run_is_written(server: Server, tmp_path: Path) -> None:
    assert run_folder(server.folder, "my.task:recipe") == server.folder / "runs" / "my.task-recipe"
    assert run_folder(server.folder, "quickstart", tmp_path / "x") == tmp_path / "x"


class Answered(Exception):
    """An error that carries what a server answered, as httpx's do."""

    def __init__(self, status: int | None) -> None:
        self.response = None if status is None else type("Response", (), {"status_code": status})


def test_a_supernode_that_is_not_let_in_waits_and_says_why_once(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Exception | str] = [Answered(412), Answered(412), Answered(401), "let in"]

    def activate(client: object, request: object) -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retry_until_admitted(activate, pause=0.0)(None, None) == "let in"
    told = [record.getMessage() for record in caplog.records]
    assert [text.split(":")[0] for text in told] == ["not let in yet (412)", "not let in yet (401)"]
    assert "clocks" in told[1]


@pytest.mark.parametrize("status", [None, 503])
def test_trouble_with_the_network_is_left_to_flower(status: int | None) -> None:
    def activate(client: object, request: object) -> str:
        raise Answered(status)

    with pytest.raises(Answered):
        retry_until_admitted(activate, pause=0.0)(None, None)


@pytest.mark.parametrize(("trouble", "said"), [("has expired", "site renew"), ("self-signed", "self-signed")])
def test_a_certificate_that_is_not_in_order_ends_no_supernode(
    trouble: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    from flwr.supernode import fleet_http_connection

    left = [f"[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {trouble}"] * 5

    def ask() -> str:
        if left:
            raise httpx.ConnectError(left.pop())
        return "renewed"

    make = fleet_http_connection.make_simple_http_retry_invoker
    flowers, ours = make(), retry_on_bad_certificate(make)()
    ours.wait_function = lambda seconds: None
    with pytest.raises(httpx.ConnectError):
        flowers.invoke(ask)  # it gives up at the first
    assert ours.invoke(ask) == "renewed"
    assert len([r for r in caplog.records if "is invalid" in r.getMessage() and said in r.getMessage()]) == 1


def test_other_trouble_is_given_up_as_flower_does() -> None:
    from flwr.supernode import fleet_http_connection

    def ask() -> None:
        raise httpx.HTTPStatusError("", request=httpx.Request("POST", "https://a"), response=httpx.Response(500))

    with pytest.raises(httpx.HTTPStatusError):
        retry_on_bad_certificate(fleet_http_connection.make_simple_http_retry_invoker)().invoke(ask)
