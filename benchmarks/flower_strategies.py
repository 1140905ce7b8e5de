"""The table of docs/flower.md: which strategies work with what a plain Flower app can give.

python benchmarks/flower_strategies.py    rewrites the table
"""

from pathlib import Path

import torch

from latecomer import AsyncStrategy, Server, TrainSpec
from latecomer.engines.plain import EPOCHS, NEAREST, needs_of
from latecomer.strategies.recipe import recipes

PAGE = Path(__file__).parents[1] / "docs" / "flower.md"
BEGIN, END = "<!-- strategies: begin -->", "<!-- strategies: end -->"


def row(name: str) -> str:
    strategy = AsyncStrategy(name).strategy
    server = Server(torch.zeros(4), strategy, TrainSpec())
    if needs := needs_of(server, {EPOCHS: 1}):
        return f"| `{name}` | no | {needs}; nearest: `{NEAREST[name]}` |"
    more = ""
    if server.spec.prox:
        more = ", clients that read `proximal-mu`"
    elif strategy.varies_epochs:
        more = f", `{EPOCHS}` in `train_config`, clients that read it"
    elif name == "asyncfeded":
        more = f"; with `kappa` above 0 also `{EPOCHS}` in `train_config`, clients that read it"
    elif name == "latecomer":
        more = "; `compensate = false`, which `AsyncStrategy` sets"
    return f"| `{name}` | yes | arrays and `num-examples`{more} |"


def table() -> str:
    lines = ["| strategy | works | needs |", "|---|---|---|"]
    return "\n".join([*lines, *(row(name) for name in recipes())])


def page(text: str) -> str:
    """The page with a new table."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
