"""Pure tensor parts, without a model."""
