"""A real federation of small devices with injected faults, and the check of its event log."""

import json
import time
from collections.abc import Callable, Iterable
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from latecomer.deploy.local import LocalFederation
from latecomer.device.flat import flat_model

APP = Path(__file__).parent / "deploy" / "light"
HIDDEN = 8
SEED = 1


class LightFederation(LocalFederation):
    """Nodes with faults that a file lists; see the app in tests/deploy/light."""

    def __init__(self, dir: Path, devices: int, tls: bool = False, slowest: float = 1.0) -> None:
        self.light = dir / "light"
        self.light.mkdir(parents=True)
        own = {"LIGHT": str(self.light)}
        count, folder = max(1, devices), dir / "federation"
        super().__init__(APP, count, folder, tls, slowest=slowest, environment=own)
        del self.nodes[devices:]  # without any, a test brings its own

    def instruct(
        self, device: int, faults: Iterable[str] = (), seconds: float | None = None
    ) -> None:
        """Set the faults of its next tasks (empty: none), and the seconds that each takes."""
        instructions: dict[str, Any] = {"faults": list(faults)}
        if seconds is not None:
            instructions["seconds"] = seconds
        path = self.light / f"device-{device}.json"
        new = path.with_suffix(".instruct")
        new.write_text(json.dumps(instructions))
        new.replace(path)

    def begun(self, device: int) -> list[str]:
        """The keys of the tasks that it has begun, in order, repetitions included."""
        return self._recorded(device, "begun")

    def answered(self, device: int) -> list[str]:
        return self._recorded(device, "answered")

    def _recorded(self, device: int, kind: str) -> list[str]:
        path = self.light / f"device-{device}.{kind}"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line)["task"] for line in lines]


class LightRun:
    """A run of the light app, seen through its folder."""

    def __init__(self, federation: LightFederation, folder: Path, **config: Any) -> None:
        self.federation, self.folder = federation, folder
        self.config = {"folder": str(folder), **config}
        self.hidden = config.get("hidden", HIDDEN)
        self.lost: list[tuple[str, int]] = []  # of each killed server app: its log and commits
        folder.mkdir(parents=True, exist_ok=True)

    def start(self) -> None:
        self.number = self.federation.run(self.config)

    def text(self) -> str:
        path = self.folder / "events.jsonl"
        return path.read_text() if path.exists() else ""

    def events(self, *kinds: str, device: int | None = None) -> list[dict[str, Any]]:
        lines = self.text().split("\n")[:-1]  # what has no end is still being written
        return [
            line
            for line in map(json.loads, lines)
            if (not kinds or line["event"] in kinds)
            and (device is None or line.get("device") == self.number_of(device))
        ]

    def number_of(self, device: int) -> int:
        """What the server calls device-i."""
        found = [
            e["device"] for e in self.events("introduction") if e["name"] == f"device-{device}"
        ]
        return found[0] if found else -1

    def arrivals(self, device: int | None = None) -> list[dict[str, Any]]:
        return self.events("arrival", device=device)

    def more(self, count: int, device: int | None = None, within: float = 60.0) -> float:
        """Wait for `count` more updates, of one device or of any; returns the seconds."""
        before = len(self.arrivals(device))
        what = f"{count} more updates of {'any device' if device is None else f'device-{device}'}"
        return self.until(lambda: len(self.arrivals(device)) >= before + count, within, what)

    def until(self, done: Callable[[], Any], within: float, what: str) -> float:
        began = time.monotonic()
        while not done():
            if time.monotonic() - began > within:
                output = self.federation.runs.log(self.number)[-1500:]
                raise AssertionError(
                    f"waited {within:g} s for {what}: {self.text()[-1500:]}{output}"
                )
            time.sleep(0.05)
        return time.monotonic() - began

    def remember(self) -> None:
        """Record the log and commits of a killed server app, to compare after its restart."""
        self.lost.append((self.text(), latest(self.folder)[0]))

    def finish(self, within: float = 60.0) -> None:
        (self.folder / "stop").touch()
        status = self.federation.runs.wait(self.number, timeout=within)
        assert status == "finished:completed", (
            status,
            self.federation.runs.log(self.number)[-3000:],
        )
        check_log(self.folder, self.federation.light, self.lost, self.hidden)


def check_log(
    folder: Path, light: Path, lost: Iterable[tuple[str, int]] = (), hidden: int = HIDDEN
) -> str:
    """Check by the event log that no commit was lost and none was applied twice.

    Every task is accepted once. Versions increase by one. Commits before a kill are unchanged after
    the restart. The final model is bit-identical to a replay of the log with the replies that the
    devices recorded themselves. Returns its hash.
    """
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    names = {e["device"]: e["name"] for e in lines if e["event"] == "introduction"}
    accepted = [e["task"] for e in lines if e["event"] == "arrival"]
    assert len(accepted) == len(set(accepted)), "a task was accepted twice"
    versions = [e["version"] for e in lines if e["event"] == "commit"]
    assert versions == list(range(1, len(versions) + 1)), "versions do not rise by one"
    assert len(versions) == len(accepted)
    resumes = [place for place, e in enumerate(lines) if e["event"] == "resume"]
    for place, (text, commits) in zip(resumes, lost, strict=True):
        before = [json.loads(line) for line in text.split("\n")[:-1]]
        assert lines[place]["version"] == commits, "a commit was lost"
        assert lines[:place] == before[:place], "the log of a killed server app has changed"
    assert [lines[place]["version"] for place in resumes] == [
        sum(e["event"] == "commit" for e in lines[:place]) for place in resumes
    ]
    network = flat_model("mlp", (8,), 2, (hidden,))
    heads = {0: network.init(SEED)}
    # A task keeps its name over restarts; a number that was forgotten may be given again.
    session = lines[resumes[0]]["run"] if resumes else latest(folder)[1]
    kept: dict[int, str] = {}
    for line in lines:
        if line["event"] == "resume":
            session = line["session"]
            kept = {int(key.rpartition("-")[2]): key for key in line["open"]}
        elif line["event"] == "arrival":
            key = kept.get(line["task"], f"{session}-{line['task']}")
            trained = heads[line["sent"]] + _delta(light / f"{names[line['device']]}-{key}.npy")
            heads[len(heads)] = torch.lerp(heads[len(heads) - 1], trained, line["weight"])
    model = network.layout.flatten(load_file(folder / "model.safetensors"))
    final = heads[len(versions)]
    assert torch.equal(model, final), "the model is not that of the replayed log"
    return sha256(final.numpy().tobytes()).hexdigest()


def latest(folder: Path) -> tuple[int, str]:
    """Commits in the last checkpoint, and the session that wrote it."""
    _, commits, session, _ = (folder / "checkpoint" / "latest").read_text().split("-")
    return int(commits), session


def _delta(path: Path) -> Tensor:
    return torch.from_numpy(np.load(BytesIO(path.read_bytes()))[0])
