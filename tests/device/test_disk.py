"""The state folder of a device is read back whole, or refused."""

import random
import stat

import pytest
import torch

from latecomer.core.messages import Update
from latecomer.device.disk import DeviceDisk, DeviceState
from latecomer.errors import BadInput


def test_a_new_device_has_kept_nothing(tmp_path):
    kept = DeviceDisk(tmp_path / "d").load()
    assert (kept.started, kept.memory, kept.answered, kept.answer) == (0, {}, "", None)


def test_what_is_saved_is_found_again(tmp_path):
    shared = torch.randn(4)
    answer = Update(0, shared, 3, {"loss": 0.25}, last=True)
    memory = {"sent": shared, "model": torch.randn(2, 3), "mean": torch.ones(1, 4).double()}
    DeviceDisk(tmp_path).save(DeviceState(5, 2, memory, "r", "s-9", answer, "b-1"))
    kept = DeviceDisk(tmp_path).load()
    assert (kept.started, kept.charges) == (5, 2)
    assert (kept.run, kept.answered, kept.answer_base) == ("r", "s-9", "b-1")
    found = kept.answer
    assert (found.num_examples, found.metrics, found.last) == (3, {"loss": 0.25}, True)
    assert kept.memory.keys() == memory.keys()
    assert all(torch.equal(kept.memory[name], memory[name]) for name in memory)
    assert kept.memory["mean"].dtype == torch.float64
    assert torch.equal(kept.answer.delta, shared)


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


def charged(folder, times=1):
    """The disk and state of a device with this number of charges; its ledger counts them."""
    disk = DeviceDisk(folder)
    state = disk.load()
    for _ in range(times):
        rows = disk.load_ledger(state)
        counts = torch.tensor([[1.0, 0.0, 2.5, 1.0, 0.0]]).double() if rows is None else rows
        counts[0, 4] += 1
        disk.save_ledger(state, counts)
        disk.save(state)
    return disk


def test_the_ledger_is_read_as_it_was_written(tmp_path):
    assert DeviceDisk(tmp_path).load_ledger(DeviceState()) is None
    disk = charged(tmp_path, 3)
    assert disk.load_ledger(disk.load()).tolist() == [[1.0, 0.0, 2.5, 1.0, 3.0]]
    assert disk.load().charges == 3


@pytest.mark.parametrize("content", [b"", b"rubbish", b"\x05\x00\x00\x00\x00\x00\x00\x00{}"])
def test_a_damaged_state_is_replaced_and_the_ledger_kept(tmp_path, content, caplog):
    disk = charged(tmp_path, 2)
    (tmp_path / "state.safetensors").write_bytes(content)
    assert disk.load_ledger(disk.load())[0, 4] == 2
    assert "checksum does not match; it starts with a new one" in caplog.text
    (tmp_path / "ledger.json").unlink()
    with pytest.raises(BadInput, match="ledger is missing"):
        disk.load_ledger(disk.load())


def test_a_ledger_never_goes_back(tmp_path):
    disk, path = charged(tmp_path, 1), tmp_path / "ledger.json"
    older = path.read_bytes()
    charged(tmp_path, 1)
    path.write_bytes(older)
    with pytest.raises(BadInput, match="has 1 charges of 2, so the privacy spent is unknown"):
        disk.load_ledger(disk.load())
    path.unlink()
    with pytest.raises(BadInput, match="is missing"):
        disk.load_ledger(disk.load())
    (tmp_path / "state.safetensors").unlink()  # a new account, on purpose
    assert disk.load_ledger(disk.load()) is None


@pytest.mark.parametrize("name", ["ledger.json", "state.safetensors"])
def test_no_random_corruption_is_loaded_silently(tmp_path, name, caplog):
    """Flipped bits, cut ends, zeroed and repeated blocks: the ledger is exact, or refused."""
    disk, path, rng = charged(tmp_path, 4), tmp_path / name, random.Random(7)
    whole = path.read_bytes()
    for number in range(200):
        data, place = bytearray(whole), rng.randrange(len(whole))
        match number % 4:
            case 0:
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                del data[place:]
            case 2:
                data[place : place + 16] = bytes(len(data[place : place + 16]))
            case 3:
                data[place:place] = data[: rng.randrange(1, 64)]
        path.write_bytes(data)
        if data == whole:
            continue
        caplog.clear()
        if name == "ledger.json":
            with pytest.raises(BadInput, match="checksum does not match"):
                disk.load_ledger(disk.load())
        else:
            state = disk.load()
            assert "checksum does not match" in caplog.text
            assert (state.started, state.memory, state.answer) == (0, {}, None)
            assert disk.load_ledger(state)[0, 4] == 4


def test_a_busy_folder_is_waited_for_and_then_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("latecomer.device.disk.LOCK_SECONDS", 0.1)
    disk = DeviceDisk(tmp_path)
    with disk.lock(needed=True), pytest.raises(BadInput, match="another process is using this dev"):
        disk.lock(needed=False)
    disk.lock(needed=True).close()


def test_a_ledger_needs_a_file_system_with_locks(tmp_path, monkeypatch):
    def none(descriptor, operation):
        raise OSError("no locks here")

    monkeypatch.setattr("fcntl.flock", none)
    DeviceDisk(tmp_path).lock(needed=False).close()
    with pytest.raises(BadInput, match="cannot be locked, which a privacy ledger needs"):
        DeviceDisk(tmp_path).lock(needed=True)


def test_half_a_write_leaves_the_old_state(tmp_path, monkeypatch):
    disk = DeviceDisk(tmp_path)
    disk.save(DeviceState(1))

    def killed(descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        disk.save(DeviceState(2))
    assert disk.load().started == 1
