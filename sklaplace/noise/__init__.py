"""Observation noise of regression: levels, residuals, and noise that varies.

No file here evaluates an estimator. The noise is estimated from residuals and moments
that other code computed.
"""
