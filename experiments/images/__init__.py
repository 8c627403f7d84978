"""Recognition of images by ResNets and their Neural ODE twins, and what other solvers do to a trained network."""
