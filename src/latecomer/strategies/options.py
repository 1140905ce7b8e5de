"""Types for the options of recipes: a number with the range in which it is valid."""

from typing import Annotated

from annotated_types import Ge, Gt, Interval

Positive = Annotated[float, Gt(0)]
NotNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Interval(gt=0, le=1)]
Proportion = Annotated[float, Interval(ge=0, le=1)]
Count = Annotated[int, Ge(1)]
CountOrOff = Annotated[int, Ge(0)]
