"""Certificates and keys, checked by OpenSSL and by Python's own TLS rather than by the library that made them."""

import datetime
import shutil
import socket
import ssl
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from mutirao.deploy import keys
from mutirao.deploy.layout import Server, load_place
from mutirao.deploy.provisioning import create_server, create_site, renew, store_key
from mutirao.deploy.server.control_calls import dismiss
from mutirao.errors import ConfigError

OPENSSL = shutil.which("openssl")
HOSTS = ["fed.example.org", "10.1.2.3", "2001:db8::7", "são-paulo.example.org"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Server:
    return create_server(tmp_path_factory.mktemp("keys") / "server", HOSTS)


def handshake(server: Server, ca: Path, name: str) -> str:
    """Speak TLS over a pair of sockets, as a server with this certificate and a client who trusts `ca`."""
    ours, theirs = socket.socketpair()
    listening = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    listening.load_cert_chain(server.certificate, server.key)

    def serve() -> None:
        try:
            with listening.wrap_socket(ours, server_side=True) as line:
                line.sendall(b"hello")
        except OSError:
            ours.close()

    thread = threading.Thread(target=serve)
    thread.start()
    context = ssl.create_default_context(cafile=str(ca))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    try:
        with context.wrap_socket(theirs, server_hostname=name) as line:
            return line.recv(5).decode()
    finally:
        theirs.close()
        thread.join(60)


@pytest.mark.parametrize("name", ["fed.example.org", "10.1.2.3", "2001:db8::7", "localhost", "127.0.0.1"])
def test_a_client_that_trusts_the_authority_takes_the_server_by_each_of_its_names(server: Server, name: str) -> None:
    assert handshake(server, server.ca, name) == "hello"


def test_no_other_name_and_no_other_authority_will_do(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(server, server.ca, "other.example.org")
    other = create_server(tmp_path / "other", HOSTS)
    with pytest.raises(ssl.SSLCertVerificationError, match="verify failed"):
        handshake(server, other.ca, "fed.example.org")


@pytest.mark.skipif(OPENSSL is None, reason="openssl is not installed")
def test_openssl_agrees_about_the_chain_the_purpose_and_the_names(server: Server) -> None:
    def openssl(*words: str | Path) -> str:
        done = subprocess.run([str(OPENSSL), *map(str, words)], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    strict = ("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", server.ca)
    assert "OK" in openssl(*strict, server.certificate)
    assert "OK" in openssl(*strict, "-verify_hostname", "fed.example.org", server.certificate)
    assert "OK" in openssl(*strict, "-verify_ip", "10.1.2.3", server.certificate)
    text = openssl("x509", "-in", server.certificate, "-noout", "-text")
    for part in ("CA:FALSE", "TLS Web Server Authentication", "DNS:xn--so-paulo-rza.example.org", "secp384r1"):
        assert part in text
    assert "CA:TRUE, pathlen:0" in openssl("x509", "-in", server.ca, "-noout", "-text")
    printed = openssl("x509", "-in", server.ca, "-noout", "-fingerprint", "-sha256")
    assert printed.strip().endswith(keys.certificate_fingerprint(server.ca))


def test_private_keys_are_for_their_owner_alone_and_nothing_is_ever_replaced(tmp_path: Path) -> None:
    server = create_server(tmp_path / "server", ["127.0.0.1"])
    node = create_site(tmp_path / "recife", "recife", "127.0.0.1:9092", server.ca)
    private = [server.ca_key, server.key, node.key]
    assert [stat.S_IMODE(key.stat().st_mode) for key in private] == [0o600] * 3
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="never replaced"):
        create_server(server.folder)
    with pytest.raises(ConfigError, match="never replaced"):
        create_site(node.folder, "natal", "127.0.0.1:9092")
    (node.folder / "site.toml").unlink()  # even a folder that lost its configuration keeps its key
    with pytest.raises(ConfigError, match="is not replaced"):
        create_site(node.folder, "recife", "127.0.0.1:9092", server.ca)
    now = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert now == {path: content for path, content in before.items() if path != node.folder / "site.toml"}


def test_what_could_not_be_made_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "ca.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match="holds no certificate"):
        create_site(tmp_path / "recife", "recife", "fed.example.org:9092", tmp_path / "ca.crt")
    with pytest.raises(ConfigError, match="is no address"):
        create_site(tmp_path / "recife", "recife", "fed.example.org", None)
    with pytest.raises(ConfigError, match="is no name"):
        create_site(tmp_path / "recife", "../recife", "fed.example.org:9092", None)
    with pytest.raises(ConfigError, match="neither a host name nor an IP address"):
        create_server(tmp_path / "server", ["https://fed.example.org"])
    assert [path.name for path in tmp_path.iterdir()] == ["ca.crt"]


def test_flower_reads_the_key_of_a_site_and_ssh_agrees_on_its_fingerprint(tmp_path: Path) -> None:
    from flwr.cli.supernode.register import try_load_public_key

    node = create_site(tmp_path / "recife", "recife", "fed.example.org:9092")
    assert try_load_public_key(node.public_key) == keys.public_key_pem(node.public_key)
    if ssh := shutil.which("ssh-keygen"):
        for file in (node.public_key, node.key):
            told = subprocess.run([ssh, "-lf", file], capture_output=True, text=True)
            assert keys.key_fingerprint(node.public_key) in told.stdout, told.stderr


def test_a_renewed_certificate_has_the_same_key_and_authority(tmp_path: Path) -> None:
    server = create_server(tmp_path / "server", ["fed.example.org"])
    old, key = server.certificate.read_bytes(), server.key.read_bytes()
    again = renew(server.folder, ["fed.example.org", "10.9.8.7"], days=10)
    assert handshake(again, server.ca, "10.9.8.7") == "hello"
    assert load_place(server.folder) == again
    assert server.key.read_bytes() == key
    assert (server.folder / "server.old.crt").read_bytes() == old
    left = keys.read_certificate(server.certificate).not_valid_after_utc - datetime.datetime.now(datetime.UTC)
    assert left.days == 9


@pytest.mark.parametrize("name", ["../recife", "/tmp/recife", "a/b", "..", "a\0b", ".hidden"])
def test_the_name_of_a_site_never_leads_out_of_the_folder_of_keys(tmp_path: Path, name: str) -> None:
    server = create_server(tmp_path / "server", ["fed.example.org"])
    site = create_site(tmp_path / "1", "recife", "fed.example.org:9092")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="is no name"):
        store_key(server.folder, site.public_key, name)
    with pytest.raises(ConfigError, match="is no name"):
        dismiss(server.folder, name)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_name_keeps_its_key(tmp_path: Path) -> None:
    server = create_server(tmp_path / "server", ["fed.example.org"])
    one = create_site(tmp_path / "1", "recife", "fed.example.org:9092")
    two = create_site(tmp_path / "2", "recife", "fed.example.org:9092")
    kept = store_key(server.folder, one.public_key)
    assert store_key(server.folder, one.public_key) == kept
    with pytest.raises(ConfigError, match="another key"):
        store_key(server.folder, two.public_key)
    with pytest.raises(ConfigError, match="under another name"):
        store_key(server.folder, one.public_key, "natal")
    three = create_site(tmp_path / "3", "olinda", "fed.example.org:9092", client="recife")
    with pytest.raises(ConfigError, match="recife is 'recife' in recipes already"):
        store_key(server.folder, three.public_key)
    assert keys.client_of_key(store_key(server.folder, three.public_key, client="c7")) == "c7"
    for wrong in (one.key, server.ca, tmp_path / "nothing"):
        with pytest.raises(ConfigError, match="is no public key"):
            store_key(server.folder, wrong, "natal")
    assert sorted(path.name for path in server.sites.iterdir()) == ["olinda.pub", "recife.pub"]
