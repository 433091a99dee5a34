"""Networks: skorch nets as functions of a batch, and their training.

`Forward` maps a batch to outputs (b, c). `OutputSpec` describes the likelihood that
these outputs parametrise. Neither changes the network. The other modules implement
training with sample weights, and default networks for tables.
"""
