"""The client app: trains, and injects the faults that a file of the device's name in $LIGHT lists.

The device also records there which tasks it has begun, and every reply before it is falsified.
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from latecomer.engines.agent import Agent
from latecomer.engines.flower import from_records, to_records
from latecomer.engines.wire import Packed, Payload
from light.task import model, part

app = ClientApp()
app.follows_delay = True


@app.query()
def introduce(message: Message, context: Context) -> Message:
    return Message(to_records(agent(context).introduce()), reply_to=message)


@app.train()
def train(message: Message, context: Context) -> Message:
    name, folder = str(context.node_config["device-id"]), Path(os.environ["LIGHT"])
    payload = from_records(message.content)
    task = payload.fields["task"]
    note(folder / f"{name}.begun", {"task": task, "time": time.time()})
    fault, seconds = orders(folder / f"{name}.json", float(context.node_config.get("delay", 0.0)))
    time.sleep(seconds)
    if fault == "raise":
        raise ValueError("instructed to fail")
    if fault == "exit":
        os._exit(3)
    answer = agent(context).answer(payload)
    keep(folder / f"{name}-{task}.npy", answer.array)
    note(folder / f"{name}.answered", {"task": task, "time": time.time()})
    return Message(to_records(falsified(answer, fault)), reply_to=message)


def agent(context: Context) -> Agent:
    config = context.node_config
    number, hidden = int(config["partition-id"]), int(context.run_config["hidden"])
    folder = Path(os.environ["LATECOMER_STATE"]) / str(config["device-id"])
    return Agent(str(config["device-id"]), model(hidden), lambda: part(number), folder)


def orders(path: Path, seconds: float) -> tuple[str, float]:
    """The fault of this task (empty: none), and its duration in seconds."""
    try:
        instructions = json.loads(path.read_text())
    except FileNotFoundError:
        return "", seconds
    faults = instructions.get("faults", [])
    fault = faults.pop(0) if faults else ""
    new = path.with_suffix(".new")
    new.write_text(json.dumps(instructions))
    new.replace(path)
    return fault, float(instructions.get("seconds", seconds))


def note(path: Path, line: dict) -> None:
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def keep(path: Path, array: Packed | None) -> None:
    if array is not None:
        new = path.with_suffix(".new")
        new.write_bytes(array.data)
        new.replace(path)


def falsified(answer: Payload, fault: str) -> Payload:
    fields, metrics, array = dict(answer.fields), dict(answer.metrics), answer.array
    match fault:
        case "nan":
            array = packed(np.full(array.shape, np.nan, dtype=np.float32))
        case "shape":
            array = packed(np.zeros((1, array.shape[1] + 1), dtype=np.float32))
        case "bytes":  # other bytes than its shape
            array = replace(array, data=packed(np.zeros((1, 4_000_000), dtype=np.float32)).data)
        case "norm":
            array = packed(np.full(array.shape, 1e6, dtype=np.float32))
        case "task":
            head, _, number = fields["task"].rpartition("-")
            fields["task"] = f"{head}-{int(number) - 1}"
        case "examples":
            metrics["num-examples"] = 1_000_000
        case "negative":
            metrics["num-examples"] = -5
        case "fresh":  # claims a base model that it was not sent
            fields["choice"] = 1
        case "metrics":
            metrics |= {f"m{i}": 1.0 for i in range(20_000)}
    return Payload(fields, metrics, array)


def packed(values: np.ndarray) -> Packed:
    from io import BytesIO

    file = BytesIO()
    np.save(file, values)
    return Packed(str(values.dtype), values.shape, file.getvalue())
