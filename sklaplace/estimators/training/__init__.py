"""Training: samples held out, and a network trained."""
