"""The Gaussian over weights, its predictives and its tuning."""
