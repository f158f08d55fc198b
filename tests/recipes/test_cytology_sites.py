"""Three hospitals with a folder each, over a SuperLink with TLS that knows their keys: the same model as in process."""

import datetime
import ipaddress
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1] / "fleets"))
from test_flower_deployment import COMMANDS, EXAMPLE, Deployment, free_port

from mutirao.config import resolve
from mutirao.recipes import find
from mutirao.running import execute

SETTINGS = {"rounds": 2, "views": 1, "slide": "", "weights": "random"}


def write_certificates(folder: Path) -> None:
    """A certificate authority, and by it a certificate of the server for loopback."""
    now = datetime.datetime.now(datetime.UTC)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "server")}
    names = {k: x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"test {k}")]) for k in keys}
    for name, key in keys.items():
        builder = (
            x509.CertificateBuilder()
            .subject_name(names[name])
            .issuer_name(names["ca"])
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
        )
        if name == "server":
            hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
            builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        made = builder.sign(keys["ca"], hashes.SHA256())
        (folder / f"{name}.crt").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (folder / "server.key").write_bytes(
        keys["server"].private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )


def write_node_key(path: Path) -> None:
    """A key pair of a node, as `ssh-keygen -t ecdsa -b 384` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption())
    )
    path.with_suffix(".pub").write_bytes(
        key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )


def write_pictures(folder: Path, count: int, seed: int) -> None:
    draw = np.random.default_rng(seed)
    for label, name in enumerate(("abnormal", "normal")):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = draw.normal(90 + 90 * label, 25, (48, 48, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


class Guarded(Deployment):
    """A deployment whose SuperLink has a certificate and a list of nodes it knows."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.env["MUTIRAO_CACHE"] = str(folder / "cache")
        write_certificates(folder)
        (self.home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\n'
            f'root-certificates = "{folder / "ca.crt"}"\n'
        )

    def flwr(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [COMMANDS / "flwr", *words], env=self.env, cwd=self.folder, capture_output=True, text=True, timeout=120
        )

    def listens(self) -> bool:
        with socket.socket() as s:
            s.settimeout(1)
            return s.connect_ex(("127.0.0.1", self.port)) == 0

    def start_node(self, name: str, data: Path, key: Path) -> None:
        self.start(
            name,
            *("flower-supernode", "--superlink", f"127.0.0.1:{self.port}"),
            *("--root-certificates", str(self.folder / "ca.crt"), "--auth-supernode-private-key", str(key)),
            *("--host", "127.0.0.1", "--port", str(free_port())),
            *("--node-config", f'name="{name}" data="{data}"'),
        )


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    made = Guarded(tmp_path)
    try:
        made.start(
            "superlink",
            *("flower-superlink", "--host", "127.0.0.1", "--port", str(made.port), "--enable-supernode-auth"),
            *("--ssl-certfile", str(tmp_path / "server.crt"), "--ssl-keyfile", str(tmp_path / "server.key")),
            *("--ssl-ca-certfile", str(tmp_path / "ca.crt")),
        )
        made.until(made.listens, 40, "a SuperLink that listens")
        yield made
    finally:
        made.end()


def test_three_hospitals_behind_tls_and_keys_make_the_model_of_the_local_fleet(
    guarded: Guarded, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = guarded.folder
    monkeypatch.setenv("MUTIRAO_CACHE", str(folder / "cache"))
    write_pictures(folder / "server" / "global_test", 4, seed=9)
    (folder / "whole").mkdir()
    (folder / "whole" / "global_test").symlink_to(folder / "server" / "global_test")
    for k in (1, 2, 3):
        own = folder / f"hospital_{k}" / f"client_{k}"  # nobody else's folder holds these pictures
        write_pictures(own, 5, seed=k)
        (folder / "whole" / f"client_{k}").symlink_to(own)
        write_node_key(folder / f"node_{k}")
        registered = guarded.flwr("supernode", "register", str(folder / f"node_{k}.pub"))
        assert registered.returncode == 0, registered.stdout + registered.stderr
        guarded.start_node(f"client_{k}", folder / f"hospital_{k}", folder / f"node_{k}")
    out = folder / "run"
    sets = " ".join(f"{key}={value}" if value != "" else f"{key}=" for key, value in SETTINGS.items())
    config = f'recipe="cytology" out="{out}" rounds=2 set="{sets} data={folder / "server"}" timeout=120.0'
    submitted = guarded.flwr("run", str(EXAMPLE), "--run-config", config)
    assert submitted.returncode == 0, submitted.stdout + submitted.stderr
    local = execute(
        "cytology", resolve(find("cytology").config, {**SETTINGS, "data": str(folder / "whole")}), folder / "local"
    )
    failed = out / "run.log"
    guarded.until(
        lambda: (out / "summary.json").exists() or (failed.exists() and "try 3" in failed.read_text()),
        240,
        "the end of the run",
    )
    there = json.loads((out / "summary.json").read_text())
    assert there["digest"] == local["digest"]
    assert there["final"] == local["final"]
