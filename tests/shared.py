"""A dataset, seeded random numbers and a time limit, shared by several tests."""

import torch

# Seconds after which a test fails that waits for another thread or process. Only a test
# that would never end reaches it, however busy the machine is.
HANGS = 600


class Rows(torch.utils.data.Dataset):
    def __init__(self, X, y):
        self.X, self.y = X, y

    def __len__(self):
        return len(self.X)

    def __getitem__(self, index):
        return self.X[index], self.y[index]


def seeded(make, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make()
