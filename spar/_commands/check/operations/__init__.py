"""What each public operation must do, as cases of `spar check`."""
