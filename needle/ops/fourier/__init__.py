"""Complex numbers as pairs, and Fourier transforms."""
