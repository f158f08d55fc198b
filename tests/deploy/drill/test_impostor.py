"""An admitted site that speaks for others, and a stranger behind a TCP forwarder: what each of them gets in a run."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from breakable import NAMES, Federation, expected_digest

from impostor import Impostor, Letter, forwarder, letters_in, post, register
from mutirao.deploy.keys import public_key_pem
from mutirao.deploy.layout import save_place
from mutirao.deploy.provisioning import create_site, store_key
from mutirao.deploy.server.control_calls import admit, node_id_of

ROUNDS = 3


@pytest.mark.slow
def test_a_site_answers_fetches_and_orders_in_the_name_of_others(tmp_path: Path) -> None:
    """A site that was admitted meddles with all that the server sends to others, and with what they answer."""
    with Federation(tmp_path) as federation:
        federation.start()
        site = create_site(tmp_path / "impostor", "impostor", federation.server.here, federation.server.ca)
        kept = store_key(federation.server.folder, site.public_key)
        admit(federation.server.folder, kept)
        liar = Impostor(federation.server, site, node_id_of(federation.server, kept) or 0)
        tried: dict[Letter, list[int]] = {}

        def meddle(out: Path) -> None:
            federation.mend()
            for letter in set(letters_in(federation.server)) - tried.keys():
                with contextlib.suppress(OSError):  # the SuperLink has other things to do
                    tried[letter] = [
                        *(liar.reply(letter), liar.reply(letter, source=liar.node)),
                        *(liar.order(letter.node, letter.run), liar.fetch(letter.run, letter.message)[0]),
                        liar.confirm(letter),
                    ]

        summary = federation.run(tmp_path / "run", ROUNDS, meddle)
        assert {status for statuses in tried.values() for status in statuses} == {403}
        federation.judge(summary, expected_digest(ROUNDS), tmp_path / "run")


@pytest.mark.slow
def test_a_stranger_and_a_site_come_through_a_forwarder_and_only_the_site_gets_in(tmp_path: Path) -> None:
    with Federation(tmp_path) as federation, forwarder(federation.server.port) as port:
        server, node = federation.server, federation.nodes[NAMES[-1]]
        save_place(replace(node, superlink=f"127.0.0.1:{port}"))
        federation.start()
        stranger = create_site(tmp_path / "stranger", "stranger", server.here, server.ca)
        key = public_key_pem(stranger.public_key)
        got = {
            "register": register(server, key, port),
            "register, direct": register(server, key),
            "submit": post(server, "/v1/control/start-run", b"", {}, port)[0],
            "take a task": post(server, "/v1/runtime/acquire-task", b"", {}, port)[0],
        }
        assert set(got.values()) == {403}, got
        assert node_id_of(server, stranger.public_key) is None
        summary = federation.run(tmp_path / "run", ROUNDS, lambda out: federation.mend())
        federation.judge(summary, expected_digest(ROUNDS), tmp_path / "run")
