"""The state folder of a device is read back whole, or refused."""

import json
import stat

import pytest
import torch
from safetensors.torch import save

from latecomer.device.disk import DeviceDisk, DeviceState, replace_file
from latecomer.errors import BadInput


def test_a_new_device_has_kept_nothing(tmp_path):
    kept = DeviceDisk(tmp_path / "d").load()
    assert (kept.started, kept.memory, kept.answered, kept.delta) == (0, {}, "", None)


def test_what_is_saved_is_found_again(tmp_path):
    shared = torch.randn(4)
    answer = {"num_examples": 3, "metrics": {"loss": 0.25}, "last": True}
    memory = {"sent": shared, "model": torch.randn(2, 3), "ledger": torch.ones(1, 4).double()}
    DeviceDisk(tmp_path).save(DeviceState(5, memory, "r", "s-9", answer, shared))
    kept = DeviceDisk(tmp_path).load()
    assert (kept.started, kept.run, kept.answered, kept.answer) == (5, "r", "s-9", answer)
    assert kept.memory.keys() == memory.keys()
    assert all(torch.equal(kept.memory[name], memory[name]) for name in memory)
    assert kept.memory["ledger"].dtype == torch.float64
    assert torch.equal(kept.delta, shared)


def test_the_secret_is_drawn_once_and_differs_between_devices(tmp_path):
    one, two = DeviceDisk(tmp_path / "1"), DeviceDisk(tmp_path / "2")
    assert one.secret() == DeviceDisk(tmp_path / "1").secret() != two.secret()
    assert len(one.secret()) == 32


def test_the_files_are_readable_by_the_owner_only(tmp_path):
    disk = DeviceDisk(tmp_path / "d")
    disk.secret()
    disk.save(DeviceState(1))
    for path in (tmp_path / "d", *(tmp_path / "d").iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x05\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_damaged_state_is_not_taken_for_a_new_device(tmp_path, content):
    """A new state would have an empty privacy ledger."""
    disk = DeviceDisk(tmp_path)
    (tmp_path / "state.safetensors").write_bytes(content)
    with pytest.raises(BadInput, match="damaged"):
        disk.load()


def test_half_a_write_leaves_the_old_state(tmp_path, monkeypatch):
    disk = DeviceDisk(tmp_path)
    disk.save(DeviceState(1))

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        disk.save(DeviceState(2))
    assert disk.load().started == 1


def test_a_state_of_an_earlier_format_is_refused_in_one_line(tmp_path):
    disk = DeviceDisk(tmp_path)
    replace_file(tmp_path / "state.safetensors", save({"delta": torch.ones(1)}, {"kept": "{}"}))
    with pytest.raises(BadInput, match=r"an earlier version, this one reads 2; .*privacy ledger"):
        disk.load()
    document = {"state": json.dumps({"format": 3})}
    replace_file(tmp_path / "state.safetensors", save({"delta": torch.ones(1)}, document))
    with pytest.raises(BadInput, match="format 3, this version reads 2"):
        disk.load()
