"""Targets: from what users pass as `y` to tensors, and back."""
