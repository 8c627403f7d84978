"""Continuous normalising flows: of images, of points in the plane, and the memory of one training step."""
