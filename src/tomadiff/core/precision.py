"""Matrix products as exact as their inputs, whatever the user has switched on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Switch TF32 off, even if the user has it on: near cosine 1 it can't tell similar tokens apart."""
    # torch.get_float32_matmul_precision() raises an error if TF32 was switched on by these newer attributes
    products = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    asked = [product.fp32_precision for product in products]
    if not {"tf32", "bf16"} & {*asked}:
        yield
        return
    for product in products:
        product.fp32_precision = "ieee"
    try:
        yield
    finally:
        for product, precision in zip(products, asked):
            product.fp32_precision = "none"  # as torch.backends.fp32_precision says, which may be all it was
            if product.fp32_precision != precision:
                product.fp32_precision = precision
