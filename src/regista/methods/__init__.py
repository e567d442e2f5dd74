"""Methods against artifacts, one package each."""
