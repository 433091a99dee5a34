"""Estimators: all classes with a ``fit`` method.

A classifier inherits its predictions from `ProbabilisticClassifier`, a regressor from
`ProbabilisticRegressor`. Each estimator holds an `OutputModel`, the source of its
outputs: a Laplace posterior, drawn weights, dropout masks, or several networks. ``fit``
creates separate objects for targets, options, training and posterior.
"""
