"""Certificates and keys: a certificate authority of the federation's own, a server certificate, a key for each site.

Elliptic curves throughout (P-384): it is what Flower's node authentication wants. Private keys are readable by their
owner alone, and nothing here replaces a file that is there. So is the server's secret.
"""

import base64
import datetime
import hashlib
import ipaddress
import os
import re
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

from mutirao.errors import ConfigError
from mutirao.io import write_whole

try:
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives import serialization as form
    from cryptography.hazmat.primitives.asymmetric import ec
except ImportError as error:  # Flower brings it
    raise ConfigError("keys and certificates need Flower: install mutirao[flower]") from error

CA_DAYS = 3650
SERVER_DAYS = 730
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # addresses for the SuperLink's own processes


def create_authority(certificate: Path, key: Path, name: str, days: int = CA_DAYS) -> None:
    """A new certificate authority; it signs servers and nothing below them (path length 0)."""
    private = new_key()
    who = common_name(f"{name} certificate authority")
    made = certificate_builder(who, who, private.public_key(), days, x509.BasicConstraints(ca=True, path_length=0))
    made = made.add_extension(key_usage(key_cert_sign=True, crl_sign=True), critical=True)
    write_private(key, private)
    write_new(certificate, signed_pem(made, private))


def create_server_certificate(
    certificate: Path, key: Path, ca: Path, ca_key: Path, hosts: Sequence[str], days: int = SERVER_DAYS
) -> None:
    """A key and a certificate of the server for these names and addresses, signed by the authority."""
    private = new_key()
    content = server_certificate(private, ca, ca_key, hosts, days)
    write_private(key, private)
    write_new(certificate, content)


def renew_server_certificate(
    certificate: Path, key: Path, ca: Path, ca_key: Path, hosts: Sequence[str], days: int = SERVER_DAYS
) -> None:
    """A new certificate for the server's present key; the old one is kept beside it."""
    content = server_certificate(private_key(key), ca, ca_key, hosts, days)
    if certificate.exists():
        write_whole(certificate.with_suffix(".old.crt"), certificate.read_bytes())
    write_whole(certificate, content)


def server_certificate(
    private: ec.EllipticCurvePrivateKey, ca: Path, ca_key: Path, hosts: Sequence[str], days: int
) -> bytes:
    """The PEM text of a certificate for TLS servers, with a subject alternative name for each host."""
    authority = read_certificate(ca)
    who = common_name(hosts[0] if hosts else "localhost")
    # Loopback too: the SuperLink's own processes connect there, and verify the certificate as sites do.
    named = [alternative_name(host) for host in dict.fromkeys([*hosts, *LOOPBACK])]
    plain = x509.BasicConstraints(ca=False, path_length=None)
    made = (
        certificate_builder(who, authority.subject, private.public_key(), days, plain)
        .add_extension(key_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([x509.oid.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(named), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key()), critical=False)  # type: ignore[arg-type]
    )
    return signed_pem(made, private_key(ca_key))


def create_node_key(key: Path, public: Path, client: str) -> None:
    """A site's key pair, as `ssh-keygen -t ecdsa -b 384` makes it: that is the form Flower reads.

    The comment of the public key is the client that the site is in recipes.
    """
    private = new_key()
    line = private.public_key().public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    write_private(key, private, form.PrivateFormat.OpenSSH)
    write_new(public, line + f" {client}\n".encode())


def public_key_pem(path: Path) -> bytes:
    """A site's public key as Flower sends and stores it; ConfigError if the file holds anything else."""
    try:
        found = form.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(f"{path} is no public key of a site: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(found, ec.EllipticCurvePublicKey):
        raise ConfigError(f"{path} is no elliptic-curve key; a site makes its own with: mutirao site init site")
    return found.public_bytes(form.Encoding.PEM, form.PublicFormat.SubjectPublicKeyInfo)


def client_of_key(path: Path) -> str:
    """The client id that belongs to a public key: the key's comment, or the name of the file."""
    return path.read_text(encoding="utf-8").strip().partition(" ")[2].partition(" ")[2].strip() or path.stem


def key_fingerprint(path: Path) -> str:
    """The hash of a public key as `ssh-keygen -lf` prints it: two people can compare it by telephone."""
    return blob_fingerprint(path.read_text(encoding="utf-8").split()[1])


def pem_fingerprint(pem: bytes) -> str:
    """The same of a public key as Flower sends it."""
    line = form.load_pem_public_key(pem).public_bytes(form.Encoding.OpenSSH, form.PublicFormat.OpenSSH)
    return blob_fingerprint(line.split()[1])


def blob_fingerprint(blob: bytes | str) -> str:
    """The hash of the middle part of a line in OpenSSH's format."""
    return "SHA256:" + base64.b64encode(hashlib.sha256(base64.b64decode(blob)).digest()).decode().rstrip("=")


def create_secret(path: Path) -> None:
    """A new secret of 256 bits, unless there is one already."""
    if not path.exists():
        write_new(path, f"{secrets.token_hex(32)}\n".encode(), mode=0o600)


def read_secret(path: Path) -> str:
    """The secret in a file; ConfigError if it is missing, no secret, or known to other users of the machine."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path} cannot be read: {reason}; 'mutirao site up' makes it") from error
    if mode & 0o077:
        raise ConfigError(f"{path} can be read by others (mode {mode:o}); remove it: 'mutirao site up' makes another")
    if not re.fullmatch("[0-9a-f]{64}", text):
        raise ConfigError(f"{path} holds no secret; remove it: 'mutirao site up' makes another")
    return text


def read_certificate(path: Path) -> x509.Certificate:
    """The certificate in a PEM file."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} holds no certificate: {getattr(error, 'strerror', None) or error}") from error


def certificate_fingerprint(path: Path) -> str:
    """The SHA-256 fingerprint of a certificate, as `openssl x509 -fingerprint -sha256` prints it."""
    return read_certificate(path).fingerprint(hashes.SHA256()).hex(":").upper()


def hosts_of(certificate: x509.Certificate) -> list[str]:
    """The names and addresses a certificate is for."""
    try:
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return []
    return [*found.get_values_for_type(x509.DNSName), *map(str, found.get_values_for_type(x509.IPAddress))]


def private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The elliptic-curve key in a PEM file."""
    try:
        found = form.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no private key: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ConfigError(f"{path} holds no elliptic-curve key")
    return found


def new_key() -> ec.EllipticCurvePrivateKey:
    """A private key on P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def common_name(text: str) -> x509.Name:
    """A name of one part; X.509 allows it 64 characters."""
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text[:64])])


def alternative_name(host: str) -> x509.GeneralName:
    """A host as a certificate names it: an address or a name."""
    plain = normalized_host(host)
    try:
        return x509.IPAddress(ipaddress.ip_address(plain))
    except ValueError:
        return x509.DNSName(plain)


def normalized_host(host: str) -> str:
    """A host name in ASCII, or an address in its shortest form; ConfigError if it is neither."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        pass
    # Certificates and TLS have host names in ASCII only (IDNA).
    try:
        plain = host.encode("idna").decode("ascii")
    except UnicodeError as error:
        raise ConfigError(f"{host!r} is neither a host name nor an IP address") from error
    if not re.fullmatch(r"[A-Za-z0-9*_]([A-Za-z0-9._-]*[A-Za-z0-9])?", plain):
        raise ConfigError(f"{host!r} is neither a host name nor an IP address")
    return plain


def certificate_builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, rank: x509.BasicConstraints
) -> x509.CertificateBuilder:
    """A certificate yet to be signed; it begins a day ago, as clocks of sites may be behind."""
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(rank, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def key_usage(digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    """What a key may be used for, and nothing else."""
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    never = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    uses = {"digital_signature": digital_signature, "key_cert_sign": key_cert_sign, "crl_sign": crl_sign}
    return x509.KeyUsage(**uses, **never)


def signed_pem(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    """The certificate, signed, as PEM text."""
    return builder.sign(key, hashes.SHA384()).public_bytes(form.Encoding.PEM)


def write_private(
    path: Path, key: ec.EllipticCurvePrivateKey, kind: form.PrivateFormat = form.PrivateFormat.PKCS8
) -> None:
    """A private key in a new file that only its owner can read, from its first byte on."""
    write_new(path, key.private_bytes(form.Encoding.PEM, kind, form.NoEncryption()), mode=0o600)


def write_new(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Write a file that must not be there yet."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # O_EXCL never opens an existing file, not even one that appears at this moment. The mode applies from the first
    # byte on: before a later chmod others could read a key.
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise ConfigError(f"{path} is there already, and is not replaced; move it away first") from None
    with os.fdopen(handle, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
