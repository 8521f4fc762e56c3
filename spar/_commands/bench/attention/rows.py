"""What is measured of each way to attend."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Row:
    """Times in seconds, memory in bytes."""

    tokens: int
    way: str
    step: float
    error: float
    outside: float = 0.0
    peak: float = 0.0
    keys: float = 0.0
    products: float = 0.0  # of the slowest rank, by the mean
    seconds: float = 0.0
