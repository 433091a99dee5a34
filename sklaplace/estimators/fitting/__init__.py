"""Fitting: accumulate the curvature, compute the posterior, estimate the noise."""
