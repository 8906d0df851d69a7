"""The maths: plain functions on tensors. Imports only torch and knows nothing about models."""

from .make_plan import make_plan
from .plan import (
    MergePlan,
    Plan,
    assign,
    destination_rows,
    merging_matrix,
    places_in_table,
    regression_matrix,
    rows_at,
    similarity,
    unit_vectors,
    unmerging_matrix,
)
from .precision import exact_products
from .regions import Regions, Slots, num_kept, one_region, partition, slot_layout
from .schedule import RefreshSchedule
from .select import facility_location

__all__ = [
    "MergePlan",
    "Plan",
    "RefreshSchedule",
    "Regions",
    "Slots",
    "assign",
    "destination_rows",
    "exact_products",
    "facility_location",
    "make_plan",
    "merging_matrix",
    "num_kept",
    "one_region",
    "partition",
    "places_in_table",
    "regression_matrix",
    "rows_at",
    "similarity",
    "slot_layout",
    "unit_vectors",
    "unmerging_matrix",
]
