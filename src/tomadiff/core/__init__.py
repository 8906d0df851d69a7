"""The maths: plain functions on tensors. Imports torch and nothing else, knows no model."""

from .plan import (
    Plan,
    Reduction,
    assign,
    destination_rows,
    merging_matrix,
    regression_matrix,
    similarity,
    unmerging_matrix,
)
from .regions import Regions, Slots, cut, kept, slots
from .schedule import Schedule
from .select import facility_location

__all__ = [
    "Plan",
    "Reduction",
    "Regions",
    "Schedule",
    "Slots",
    "assign",
    "cut",
    "destination_rows",
    "facility_location",
    "kept",
    "merging_matrix",
    "regression_matrix",
    "similarity",
    "slots",
    "unmerging_matrix",
]
