"""What leaves the library: features, and later cured models."""
