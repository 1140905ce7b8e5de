"""With a Flower that warm nodes do not know, there are stock nodes and a warning."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from latecomer.deploy import local
from latecomer.deploy.local import LocalFederation
from latecomer.errors import BadInput

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-digits"


@pytest.mark.parametrize(("version", "is_warm"), [("1.41.0", True), ("9.9.0", False)])
def test_unknown_versions_get_stock_nodes(tmp_path, monkeypatch, caplog, version, is_warm):
    monkeypatch.setattr(local, "flower_version", lambda: version)
    with caplog.at_level(logging.WARNING), LocalFederation(EXAMPLE, 2, tmp_path, tls=True) as fed:
        assert fed.warm is is_warm
        for node in fed.nodes:
            assert (node.client is not None) is is_warm
            assert ("latecomer.deploy.warm" in node.supernode.command) is is_warm
    assert bool(caplog.messages) is not is_warm
    if not is_warm:
        assert "not tested with flwr 9.9.0" in caplog.messages[0]


def test_every_device_is_later_than_the_one_before(tmp_path):
    with LocalFederation(EXAMPLE, 3, tmp_path, slowest=4.0, node_config={"width": 0.5}) as fed:
        told = [node.options.config for node in fed.nodes]
    assert [text.split("delay=")[1].split()[0] for text in told] == ["0.0", "2.0", "4.0"]
    assert told[1].startswith('device-id="device-1" partition-id=1 num-partitions=3')
    assert all("width=0.5" in text for text in told)
    assert len({node.options.port for node in fed.nodes}) == 3


def test_secrets_of_a_federation_are_the_owners(tmp_path):
    with LocalFederation(EXAMPLE, 1, tmp_path, tls=True):
        pass
    secrets = [*tmp_path.rglob("executor-secret"), tmp_path / "keys" / "device-0"]
    assert len(secrets) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    assert not (tmp_path / "processes.json").exists()


def test_no_devices_are_no_federation(tmp_path):
    with pytest.raises(BadInput, match="--devices 0"):
        LocalFederation(EXAMPLE, 0, tmp_path)
