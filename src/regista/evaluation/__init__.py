"""What the features are worth on real tasks, one package a task."""
