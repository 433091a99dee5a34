"""Networks: a skorch net as a function of a batch, and the training of its weights.

`Forward` maps a batch to outputs (b, c). `OutputSpec` describes the likelihood that
these outputs parametrise. Both leave the network unchanged. The other modules implement
data sets, training with sample weights, the split into training and validation data,
and the default networks for tables.
"""
