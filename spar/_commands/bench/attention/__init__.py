"""`spar bench --attention`."""
