"""How spar.integrations.diffusers shards a model: plans, sequences, attention."""
