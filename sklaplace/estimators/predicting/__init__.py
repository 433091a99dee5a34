"""Predicting: from the outputs of batches to predictions."""
