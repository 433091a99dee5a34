"""A skorch net as a function: its outputs, its training, its data."""
