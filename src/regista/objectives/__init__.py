"""Objectives of training: one ``TrainingTask`` each."""
