"""Certificates that clients of today accept, and keys that Flower registers."""

import ssl
import stat

import pytest

pytest.importorskip("cryptography", reason="needs the extra 'flower'")

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key
from cryptography.hazmat.primitives.serialization.ssh import load_ssh_private_key

from latecomer.deploy.certificates import make_certificates, make_node_key


def handshake(made, host):
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made.certificate, made.key)
    client = ssl.create_default_context(cafile=str(made.authority))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = client.wrap_bio(to_client, to_server, server_hostname=host)
    there = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(5):
        for side in (here, there):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return here.version()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_client_that_knows_the_authority_trusts_the_server(tmp_path, host):
    assert handshake(make_certificates(tmp_path), host) == "TLSv1.3"


def test_another_host_is_not_trusted(tmp_path):
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(make_certificates(tmp_path, ["fed.example", "10.0.0.7"]), "localhost")


def test_secrets_are_the_owners_and_what_is_there_is_kept(tmp_path):
    made = make_certificates(tmp_path / "c")
    private, public = make_node_key(tmp_path / "k", "node")
    before = [path.read_bytes() for path in (made.key, made.authority, private, public)]
    for path in (made.key, private):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    make_certificates(tmp_path / "c")
    make_node_key(tmp_path / "k", "node")
    assert before == [path.read_bytes() for path in (made.key, made.authority, private, public)]
    assert not list((tmp_path / "c").glob("ca.key"))


def test_a_node_key_is_one_that_flower_takes(tmp_path):
    private, public = make_node_key(tmp_path, "node")
    key = load_ssh_private_key(private.read_bytes(), None)
    assert isinstance(key, ec.EllipticCurvePrivateKey)
    assert key.curve.name == "secp384r1"
    assert load_ssh_public_key(public.read_bytes()) == key.public_key()
