"""When a plan is refreshed: destinations rarely, weights more often."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RefreshSchedule:
    """For how many steps destinations and weights are reused; `weights` divides `destinations`."""

    destinations: int
    weights: int

    def due(self, destinations_age: int, weights_age: int) -> Literal["destinations", "weights"] | None:
        """What to recompute, given ages in steps. New destinations always imply new weights."""
        if destinations_age >= self.destinations:
            return "destinations"
        return "weights" if weights_age >= self.weights else None
