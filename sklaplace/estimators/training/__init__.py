"""Training: holding out samples and training a network."""
