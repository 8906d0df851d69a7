"""When a plan is made anew: destinations seldom, weights more often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RefreshSchedule:
    """For how many steps destinations and weights are kept; the second divides the first."""

    destinations: int
    weights: int

    def due(self, destinations_age: int, weights_age: int) -> Literal["destinations", "weights"] | None:
        """What has to be made anew, by age in steps. New destinations always bring new weights."""
        if destinations_age >= self.destinations:
            return "destinations"
        return "weights" if weights_age >= self.weights else None
