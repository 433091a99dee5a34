"""Fitting: curvature accumulated, posterior solved, noise estimated."""
