"""Register tokens as learnable parameters (2309.16588): inserted here, trained by an objective."""
