"""Reference points without federation: every device alone, and all data in one place."""

from latecomer.core.strategy import Mix, Strategy
from latecomer.strategies.parts.dispatching import OneLineageEach
from latecomer.strategies.recipe import recipe


@recipe("standalone", "every device trains for itself, nothing is shared", "reference")
def standalone() -> Strategy:
    return Strategy(name="standalone", merge=Mix(), dispatch=OneLineageEach())


@recipe("centralised", "one machine holds everybody's data", "reference", pooled=True)
def centralised() -> Strategy:
    """The runner gives all training data to one device; each of its updates replaces the model."""
    return Strategy(name="centralised", merge=Mix(), has_epochs=True)
