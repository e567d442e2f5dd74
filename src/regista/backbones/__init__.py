"""ViTs one can look into and edit: one adapter a library, one protocol."""
