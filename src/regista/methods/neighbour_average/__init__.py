"""Outlier tokens replaced by the mean of their neighbours: the simplest repair, to compare others with."""
