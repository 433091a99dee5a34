"""Options: checks of constructor parameters before training."""
