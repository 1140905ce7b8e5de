"""TLS certificates and node keys for a federation without a public authority.

Needs the extra `flower`.
"""

import datetime
import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DAYS = 365
HOSTS = ("localhost", "127.0.0.1")


@dataclass(frozen=True, slots=True)
class Certificates:
    """Certificate files of a SuperLink with TLS; nodes and users need only `authority`."""

    authority: Path
    certificate: Path
    key: Path


def certificate_files(folder: Path) -> Certificates:
    """The paths that `make_certificates` writes to."""
    return Certificates(folder / "ca.crt", folder / "server.pem", folder / "server.key")


def make_certificates(folder: Path, hosts: Sequence[str] = HOSTS) -> Certificates:
    """Write an authority and a certificate for these hosts that it has signed.

    Existing files are kept. The private key of the authority is not stored, so that no other
    certificate can be signed with it.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

    found = certificate_files(folder)
    if all(path.exists() for path in (found.authority, found.certificate, found.key)):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    signer, holder = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))

    def name(common: str) -> Any:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])

    def draft(subject: str, key: Any, signs: bool) -> Any:
        now = datetime.datetime.now(datetime.UTC)
        usage = x509.KeyUsage(not signs, False, False, False, False, signs, signs, False, False)
        return (
            x509.CertificateBuilder()
            .subject_name(name(subject))
            .issuer_name(name("Latecomer local authority"))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            # Valid at once for a device whose clock is up to an hour behind.
            .not_valid_before(now - datetime.timedelta(hours=1))
            .not_valid_after(now + datetime.timedelta(days=DAYS))
            .add_extension(x509.BasicConstraints(ca=signs, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(
                x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
            )
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
                critical=False,
            )
        )

    authority = draft("Latecomer local authority", signer, True).sign(signer, hashes.SHA256())
    names = x509.SubjectAlternativeName([_alternative(host) for host in hosts])
    serves = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
    certificate = (
        draft(hosts[0], holder, False)
        .add_extension(names, critical=False)
        .add_extension(serves, critical=False)
        .sign(signer, hashes.SHA256())
    )
    found.authority.write_bytes(_pem(authority))
    found.certificate.write_bytes(_pem(certificate))
    write_secret(found.key, _private(holder, ssh=False))
    return found


def make_node_key(folder: Path, name: str) -> tuple[Path, Path]:
    """Write the key pair of a node: (private, public for registration). Existing files are kept."""
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    private, public = folder / name, folder / f"{name}.pub"
    if private.exists() and public.exists():
        return private, public
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    public.write_bytes(
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n"
    )
    write_secret(private, _private(key, ssh=True))
    return private, public


def write_secret(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read, created with that permission."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)


def _alternative(host: str) -> Any:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _pem(certificate: Any) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return bytes(certificate.public_bytes(Encoding.PEM))


def _private(key: Any, ssh: bool) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    form = PrivateFormat.OpenSSH if ssh else PrivateFormat.PKCS8
    return bytes(key.private_bytes(Encoding.PEM, form, NoEncryption()))
