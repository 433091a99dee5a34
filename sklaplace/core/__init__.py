"""Linear algebra, option checks, random numbers, memory budget and cache."""
