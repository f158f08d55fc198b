"""Pictures: of data, of runs and of studies."""
