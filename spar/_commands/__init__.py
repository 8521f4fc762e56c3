"""The commands of `python -m spar`. Nothing else in spar imports them."""
