"""Shared utilities, independent of networks and posteriors.

`linalg` and `newton` implement numerical methods. `random` generates reproducible
random numbers, and `trees` handles nested inputs. `checks` validates values and shows
each warning once. `budget` limits memory. `cache` stores results in a `joblib.Memory`,
under a hash of everything they depend on. `parallel` runs joblib workers, and
`progress` reports on a fit. `serialise` stores objects in files, and loads them without
running code from the files.
"""
