"""Stock models over a sharded sequence; each module imports its library inside its functions."""
