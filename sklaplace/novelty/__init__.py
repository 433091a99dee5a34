"""Novelty: what is far from the training samples, and what follows for the outputs.

`leverage` is a distance of features from the training samples. `novelty` combines
leverages and other quantities into tail probabilities. `residual` adds uncertainty to
outputs of samples with small tail probabilities.
"""
