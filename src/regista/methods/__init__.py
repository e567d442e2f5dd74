"""Ways to fix or read out a model, one folder each."""
