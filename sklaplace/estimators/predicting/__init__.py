"""Predicting: turn the outputs of batches into predictions."""
