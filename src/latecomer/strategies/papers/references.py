"""Reference points without federation: local training only, and central training on all data."""

from latecomer.core.strategy import Mix, Strategy
from latecomer.strategies.parts.dispatching import OneLineageEach
from latecomer.strategies.recipe import recipe


@recipe("standalone", "every device trains its own model, nothing is shared", "reference")
def standalone() -> Strategy:
    """Every device has its own lineage, whose head its updates replace. No options."""
    return Strategy(name="standalone", merge=Mix(), dispatch=OneLineageEach())


@recipe("centralised", "central training on the data of all devices", "reference", pooled=True)
def centralised() -> Strategy:
    """One device has all training data, and its updates replace the head. No options."""
    return Strategy(name="centralised", merge=Mix(), has_epochs=True)
