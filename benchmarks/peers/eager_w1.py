"""The yardstick: nn.Module + torch.optim.SGD, one device after another, FedAsync merge."""

import torch
from w1 import DEVICES, Meter, accuracy, make_w1, mlp, train

ALPHA = 0.6


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, server, local = make_w1(0), mlp(), mlp()
    meter = Meter(warmup=100, updates=1000)
    while not meter.done:
        device = meter.seen % DEVICES
        local.load_state_dict(server.state_dict())
        train(local, *data[device])
        with torch.no_grad():
            for w, wk in zip(server.parameters(), local.parameters(), strict=True):
                w.lerp_(wk, ALPHA)
        meter.add()
    note = (
        f"plain loop, no simulator; shuffled tensor batches; accuracy {accuracy(server, data):.2f}"
    )
    meter.report("eager loop", torch.__version__, note)


if __name__ == "__main__":
    main()
