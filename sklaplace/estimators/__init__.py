"""Estimators: everything with ``fit``.

A classifier inherits its predictions from `ProbabilisticClassifier`, a regressor from
`ProbabilisticRegressor`. Where the outputs come from (a Laplace posterior, drawn
weights, dropout masks, several networks) is an `OutputModel` that the estimator holds.
Targets, options, training and posterior are objects of their own, made in ``fit``.
"""
