"""From a network and data to the curvature of the loss."""
