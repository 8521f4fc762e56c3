"""What spar.integrations.transformers is made of."""
