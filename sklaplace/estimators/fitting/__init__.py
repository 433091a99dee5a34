"""Fitting: accumulate the curvature, solve for the posterior, estimate the noise."""
