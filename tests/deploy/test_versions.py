"""With a Flower that warm nodes do not know, there are stock nodes and a warning."""

import logging
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs the extra 'flower'")

from latecomer.deploy import node as nodes
from latecomer.deploy.flower_server import FlowerServer
from latecomer.deploy.local import LocalFederation
from latecomer.errors import BadInput

EXAMPLE = Path(__file__).parents[2] / "examples" / "flower-digits"


@pytest.mark.parametrize(("version", "is_warm"), [("1.41.0", True), ("9.9.0", False)])
def test_unknown_versions_get_stock_nodes(tmp_path, monkeypatch, caplog, version, is_warm):
    monkeypatch.setattr(nodes, "flower_version", lambda: version)
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
        configs = [node.options.config for node in fed.nodes]
    assert [text.split("delay=")[1].split()[0] for text in configs] == ["0.0", "2.0", "4.0"]
    assert configs[1].startswith('device-id="device-1" partition-id=1 num-partitions=3')
    assert all("width=0.5" in text for text in configs)
    assert len({node.options.port for node in fed.nodes}) == 3


def test_secrets_of_a_federation_are_the_owners(tmp_path):
    with LocalFederation(EXAMPLE, 1, tmp_path, tls=True) as fed:
        fed.prepare()
        fed.nodes[0].prepare()
    secrets = [*tmp_path.rglob("executor-secret"), tmp_path / "keys" / "device-0"]
    assert len(secrets) == 3
    assert all(path.stat().st_mode & 0o077 == 0 for path in secrets)
    assert not (tmp_path / "processes.json").exists()


def test_a_constructor_writes_nothing(tmp_path):
    with LocalFederation(EXAMPLE, 2, tmp_path / "new", tls=True) as fed:
        assert len(fed.nodes) == 2
        assert fed.server.address.startswith("127.0.0.1:")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("fails", ["prepare", "is_healthy"])
def test_a_start_that_fails_leaves_the_folder_to_the_next(tmp_path, monkeypatch, fails):
    def broken(server):
        raise OSError("no space left")

    fed = LocalFederation(EXAMPLE, 1, tmp_path)
    monkeypatch.setattr(FlowerServer, fails, broken)
    with pytest.raises(OSError, match="no space left"):
        fed.start()
    assert not (tmp_path / "processes.json").exists()
    assert fed.processes() == []


def test_a_start_without_an_app_writes_nothing(tmp_path):
    with pytest.raises(BadInput, match="not a Flower app"):
        LocalFederation(tmp_path, 1, tmp_path / "new").start()
    assert not (tmp_path / "new").exists()


def test_no_devices_are_no_federation(tmp_path):
    with pytest.raises(BadInput, match="--devices 0"):
        LocalFederation(EXAMPLE, 0, tmp_path)
