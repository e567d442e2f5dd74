"""Images and annotations: from files to batches."""
