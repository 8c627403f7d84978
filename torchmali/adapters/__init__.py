"""Classes with the calls of other libraries, on top of `solve`. They need none of these libraries."""
