"""Experiments on the paper's theory: gradient errors, memory, counts, stability, and its drawings from real runs."""
