"""Training: hold out samples and train a network."""
