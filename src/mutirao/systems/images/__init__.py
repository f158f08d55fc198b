"""Pictures: the data sets of image classification as their publishers ship them, and their models."""
