"""Names of other systems for operations: a module for each system."""
