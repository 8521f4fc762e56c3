"""The operations, each a pair of layouts. `spar` exports them."""
