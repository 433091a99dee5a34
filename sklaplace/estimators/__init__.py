"""Estimators: all classes with a ``fit`` method.

A classifier inherits its predictions from `ProbabilisticClassifier`, a regressor from
`ProbabilisticRegressor`. Each estimator holds an `OutputModel`, the source of its
outputs: a Laplace posterior, drawn weights, dropout masks, or several networks. ``fit``
creates one object each for the targets, the options, the training and the posterior.
"""
