"""Time series: a latent ODE that fills gaps, Neural CDEs that recognise series."""
